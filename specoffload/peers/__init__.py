"""The rival that `bench` compares with: llama.cpp on the same file, as its owner would tune it."""
