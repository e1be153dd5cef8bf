"""Deployments as state machines: values in, values and events out; no grpc, no protobuf, no clock, no threads."""
