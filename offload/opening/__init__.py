"""From the options of an engine to its open parts: decided once, then executed."""
