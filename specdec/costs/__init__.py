"""The price of a verification batch, and the worth of a drafter's probability."""
