"""The drafters, the policy and the batch costs of an opened session."""
