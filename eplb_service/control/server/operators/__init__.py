"""What operators ask, and what they are answered."""
