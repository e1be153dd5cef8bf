"""Deployments as state machines: calls in, values and events out. No gRPC, protobuf, clock or threads."""
