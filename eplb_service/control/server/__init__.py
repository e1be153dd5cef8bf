"""The running service around the core: gRPC, credentials, streams, the store, settings and planner threads."""
