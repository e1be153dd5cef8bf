"""The data plane: one agent inside every inference rank, recording expert heat and hot-swapping expert weights."""
