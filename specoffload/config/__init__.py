"""What was asked for, resolved once."""
