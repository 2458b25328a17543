"""A draft model in torch that stays on the GPU: k tokens are k replays of a graph, and one copy.

Nothing here imports torch until a draft is opened: `devices` says whether and where it can be.
"""
