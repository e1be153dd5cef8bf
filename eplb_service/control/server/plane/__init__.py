"""The control plane: every call to a deployment, and what follows from it, goes through here."""
