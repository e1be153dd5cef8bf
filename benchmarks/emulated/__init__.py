"""Benchmark of the time that balancing saves on ranks that emulate devices."""
