"""Parts of `bench`: the machine's load, llama-bench's output, texts that should be equal."""
