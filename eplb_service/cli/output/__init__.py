"""How results leave a command: tables of 80 columns, JSON, and the documents that JSON is described by."""
