"""An opened session's drafting: its drafters, its policy, and what batches cost it."""
