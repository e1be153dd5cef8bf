"""Balancers of inference engines, run from their published sources. This project contains none of their code."""
