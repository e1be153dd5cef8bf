"""Placements for hosts that split every step's tokens over replicas as well as they can be split."""
