"""The server's own state, for people and programs that watch it."""
