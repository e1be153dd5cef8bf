"""The demo's stage: runs rank processes with a service, scores how well they are balanced, and shows the result."""
