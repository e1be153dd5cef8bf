"""What the layer switch costs the model: ``make bench-switch``."""
