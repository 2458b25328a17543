"""Policies and drafters without a model."""
