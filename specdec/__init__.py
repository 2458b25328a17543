"""Speculative decoding guided by measured costs, without dependence on an inference library.

`decoding.loop` runs the decoding loop on a `types.Target`. Drafters propose tokens, and policies
decide how many.
"""
