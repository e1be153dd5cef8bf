"""Control plane: applies every call to its deployment and handles the resulting events."""
