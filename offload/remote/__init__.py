"""Workers: machines that offer devices over ggml's RPC."""
