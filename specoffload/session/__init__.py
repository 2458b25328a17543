"""An opened target, its draft, and the generations they run."""
