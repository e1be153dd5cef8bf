"""HTTP server of a service, and its web page."""
