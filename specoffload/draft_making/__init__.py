"""Makes a draft model for one's own target and texts: a shorter vocabulary, or trained weights."""
