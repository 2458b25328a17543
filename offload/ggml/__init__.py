"""The only ctypes of this package: libllama and libggml as Python functions and structures."""
