"""The worker's side of a model on several machines: computes some of the layers for a client."""
