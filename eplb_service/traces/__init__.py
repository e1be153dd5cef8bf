"""Heat traces of any origin: read in slices larger than memory, written while serving, made from other tools' files."""
