"""The engine process, the pipe to it, and the client that queues jobs for it."""
