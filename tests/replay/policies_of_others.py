"""Module with policies that tests load by name."""
