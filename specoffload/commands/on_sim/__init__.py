"""What `bench` measures on simulated devices."""
