"""The permute switch of multi-head latent attention."""
