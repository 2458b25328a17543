"""Several models behind one server: which are open, and which of them answers a request."""
