"""References of the docs site, generated from the commands and settings classes themselves."""
