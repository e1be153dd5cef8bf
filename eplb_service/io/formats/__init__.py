"""Files of other programs: engines' recorders, benchmarks, responses, tables; each read as heat."""
