"""The other end of a model over several machines: a worker that computes some layers of a file."""
