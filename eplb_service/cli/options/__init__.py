"""Options that several commands have, each declared and checked once."""
