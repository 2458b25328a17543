"""The user's wishes, resolved once."""
