"""The client's side of workers, the machines that offer devices over ggml's RPC."""
