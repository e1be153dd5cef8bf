"""Real inference engines on CPU, balanced by the agent: `make test-engines`. Shims here exist to run on CPU alone."""
