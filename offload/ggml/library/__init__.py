"""The installed library: its structures, symbols, callbacks, log and self-test."""
