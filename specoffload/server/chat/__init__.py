"""Chat over HTTP: requests become conversations, prompts and worded answers."""
