"""Loads and checks the installed library: structures, symbols, callbacks, log, self-test."""
