"""One of several services leads: the one that holds a lease."""
