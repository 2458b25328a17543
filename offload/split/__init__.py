"""Split layers, whose experts the GPU and the CPU share so that a batch ends soonest."""
