"""Times of verification batches, and calibrated probabilities that drafted tokens are accepted."""
