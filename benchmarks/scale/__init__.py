"""How many ranks one service holds, and what they cost it."""
