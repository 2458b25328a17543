"""Turns conversations into prompts, and a model's text into content, reasoning and calls. Pure.

`ChatFormat` is made once from a model's template. It turns a `Conversation` into a `ChatPrompt`,
whose `parser()` reads the answer while it is generated.
"""
