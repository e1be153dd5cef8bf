"""Finds placements: what is minimised, built greedily and by a tree, then improved by local search and annealing."""
