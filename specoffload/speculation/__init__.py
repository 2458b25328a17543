"""A session's speculation: its drafter, its policy, and the measured costs that price drafts."""
