"""Measurements of `bench` on simulated devices."""
