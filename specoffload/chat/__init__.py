"""Conversations to prompts, and a model's text back to content, reasoning and tool calls. Pure.

`ChatFormat` is made once of a model's template; it turns a `Conversation` into a `ChatPrompt`,
whose `parser()` reads the answer as it is generated.
"""
