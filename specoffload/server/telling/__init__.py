"""Answers to requests of several jobs, told in the words of some API."""
