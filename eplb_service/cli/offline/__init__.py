"""The commands on recorded heat: no service, no ranks."""
