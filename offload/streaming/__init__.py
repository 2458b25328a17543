"""Executes the schedule: copy engines, and graphs run between their cuts."""
