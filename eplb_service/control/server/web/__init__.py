"""Over HTTP: metrics, the web page, and what it shows as JSON."""
