"""Runs graphs on a device as the schedule says: copies, cuts, passes, split layers, the player."""
