"""What a verification batch costs and what a drafter's probability is worth."""
