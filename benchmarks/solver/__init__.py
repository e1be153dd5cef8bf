"""The solver beside other people's, on the same heat."""
