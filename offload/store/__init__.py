"""Host memory that holds streamed weights, and how the file's bytes come into it."""
