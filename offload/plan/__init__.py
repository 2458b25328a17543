"""The plan: which weights are resident and which stream, from a header and a budget. Pure."""
