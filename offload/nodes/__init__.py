"""Memory nodes: the threads of an engine and the pages of its store."""
