"""Options, answers and counts of one generation, for sessions and their clients."""
