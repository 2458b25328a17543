"""The decoding loop, which drafts, verifies, accepts and rewinds, and its parts."""
