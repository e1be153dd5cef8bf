"""The embedded model: a small byte-level Mixture-of-Experts transformer, served expert-parallel by ``eplb demo``."""
