"""Target module for policies that tests load by name."""
