"""The parts of scripts/attack."""
