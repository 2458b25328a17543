"""Completions of prompts: OpenAI's, and llama-server's own."""
