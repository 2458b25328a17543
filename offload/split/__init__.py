"""Split layers: each expert where it finishes first, on the GPU or on the CPU."""
