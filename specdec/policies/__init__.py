"""Policies, which decide how many tokens are drafted and verified."""
