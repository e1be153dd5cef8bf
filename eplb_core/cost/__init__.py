"""Cost of a rank's tokens in microseconds, and cost of moving experts: fits, measurements and curve files."""
