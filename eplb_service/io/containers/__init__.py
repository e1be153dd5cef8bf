"""Files that hold arrays or records, whatever these mean: read with bounds on their size, never run."""
