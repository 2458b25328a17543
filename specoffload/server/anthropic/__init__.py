"""Anthropic's Messages API, in terms of a chat request and of the parts of its answer."""
