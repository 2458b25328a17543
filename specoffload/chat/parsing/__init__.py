"""Reading a model's text while it arrives: the same deltas wherever it is cut."""
