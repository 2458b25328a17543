"""Conversations to prompts, and a model's text back to content, reasoning and tool calls. Pure.

`ChatFormat` is made once from a model's template. It turns a `Conversation` into a `ChatPrompt`,
whose `parser()` reads the answer while it is generated.
"""
