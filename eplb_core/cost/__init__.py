"""Cost of serving tokens, in microseconds, and of moving experts: fits, measurements and curve files."""
