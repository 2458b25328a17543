"""From a configuration to an open engine: what is found, decided, and kept of earlier starts."""
