"""The cost model: how long a decode of n tokens takes, in each way that it can be computed."""
