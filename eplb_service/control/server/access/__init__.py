"""Credentials of callers, and limits on what they may take."""
