"""The experts that routers choose: recorded, guessed and counted."""
