"""Trains the embedded model that ``eplb demo`` serves: corpus, training, evaluation. No part of any wheel."""
