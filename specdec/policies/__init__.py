"""Policies, one file each: how long a draft is worth verifying."""
