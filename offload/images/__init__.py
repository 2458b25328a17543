"""Images in prompts: libmtmd, which makes rows of them, and the files that clients send."""
