"""Embedded model: a small byte-level Mixture-of-Experts transformer that ``eplb demo`` serves expert-parallel."""
