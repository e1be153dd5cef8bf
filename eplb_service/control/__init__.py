"""Deployments of a service: `core` holds their state, and `server` connects it to ranks, operators and the store."""
