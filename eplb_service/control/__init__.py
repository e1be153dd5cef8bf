"""The service that agents connect to: sessions, deployments, decisions, history."""
