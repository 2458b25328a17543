"""Choosing tokens: options, grammars, and what is told of each choice. No libllama here."""
