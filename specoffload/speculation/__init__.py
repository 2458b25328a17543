"""How an opened session drafts: its drafters, its policy, and what batches cost it."""
