"""Executes the schedule: copies pieces into slots, and runs graphs from cut to cut."""
