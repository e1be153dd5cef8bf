"""The wire contract: generated stubs, and the codec between messages and checked numpy arrays."""
