"""Other people's balancers, run from their published sources; nothing of them is kept in this project."""
