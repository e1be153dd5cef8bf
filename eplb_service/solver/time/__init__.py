"""Decides by time instead of tokens, where a cost curve says what a rank's tokens take."""
