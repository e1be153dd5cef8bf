"""``eplb demo``: service and live ranks on one machine."""
