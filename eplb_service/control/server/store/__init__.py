"""Facts that outlive a restart: leader terms, placements and plans, in one SQLite file."""
