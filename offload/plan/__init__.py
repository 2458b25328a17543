"""What lives where, from the model's header and a budget: pure."""
