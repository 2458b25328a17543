"""Options and grammars for choosing tokens, and the probabilities reported. No libllama here."""
