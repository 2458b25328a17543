"""A conversation at a terminal: keyboard input, stored messages, and the display of answers."""
