"""What it is worth to split every step's tokens by their own counts, and what that costs."""
