"""Which expert stands where before any balancing, and the tables that follow."""
