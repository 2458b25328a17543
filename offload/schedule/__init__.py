"""Which streamed piece is copied when, and over what: pure."""
