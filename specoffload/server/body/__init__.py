"""A request's body: read within limits, renamed to the names used here, and checked."""
