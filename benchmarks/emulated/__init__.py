"""What balance is worth in time, on ranks that stand for devices."""
