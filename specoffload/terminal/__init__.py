"""A conversation at a terminal: what is typed, what is remembered, what is shown."""
