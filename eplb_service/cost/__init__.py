"""What a rank's tokens cost in microseconds: cost curves, where they come from, and whether they fit."""
