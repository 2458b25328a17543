"""The cost model: seconds of a decode of n tokens, for each way in which it can be computed."""
