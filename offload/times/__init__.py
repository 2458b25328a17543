"""Times of decodes: estimated from a machine's speeds, measured, and corrected in use."""
