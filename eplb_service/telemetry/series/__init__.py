"""The service's Prometheus series by what they are of: balance, its worth, plans, agents, and the service itself."""
