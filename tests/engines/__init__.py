"""Tests of real inference engines on CPU, balanced by the agent: `make test-engines`.

The shims are only needed on CPU.
"""
