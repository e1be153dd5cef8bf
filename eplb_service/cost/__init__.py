"""What a rank's tokens cost in microseconds, and what moves cost: where the figures come from, and whether they fit."""
