"""Runs a draft model in torch on the GPU. Drafting k tokens takes k graph replays and one copy.

torch is imported only when a draft is opened. `devices` says whether and where that is possible.
"""
