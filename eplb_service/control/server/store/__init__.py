"""What a restart remembers: leader terms, placements and plans, in one SQLite file."""
