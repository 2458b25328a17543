"""Models by name: repositories of the hub, ollama's, folders and caches, down to a file."""
