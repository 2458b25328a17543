"""Finds the file of a model by a name: on the hub, in ollama, in a folder, or in a cache."""
