"""Reference pages of the docs site, generated from the commands, the settings classes and the metrics."""
