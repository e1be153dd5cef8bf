"""What other programs save: engines' recorders, benchmarks, responses, tables; each read as heat."""
