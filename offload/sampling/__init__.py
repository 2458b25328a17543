"""Options and grammars for choosing tokens, and reported probabilities. Uses no libllama."""
