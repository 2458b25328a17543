"""The store: host memory of streamed weights, its layout, and the readers that fill it."""
