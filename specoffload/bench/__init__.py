"""Parts of `bench`: times of each path, load by other programs, output in llama-bench's form."""
