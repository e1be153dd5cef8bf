"""What each rank did, step by step, on disk; and the proof from it that no rank ever stood apart."""
