"""The schedule, which decides when each piece is copied, and into which slot. Pure."""
