"""The commands that ask a running service."""
