"""Files: heat traces of any origin, read in slices and written while serving; placements in each engine's format."""
