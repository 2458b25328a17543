"""The plan of what lives where, from the model's header and a budget: pure."""
