"""Control plane: every call to a deployment, and all its consequences, pass through here."""
