"""Control plane: applies every call to its deployment and carries out the resulting events."""
