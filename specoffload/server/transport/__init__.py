"""Sockets: how many, for how long, and what is logged of them."""
