"""Cost of a rank's tokens in microseconds, and of moves: fitted, measured, and read from files."""
