"""Metrics and logs of the service, and figures of deployments as text."""
