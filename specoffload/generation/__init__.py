"""What one generation is asked, answers and counts, for sessions and their clients."""
