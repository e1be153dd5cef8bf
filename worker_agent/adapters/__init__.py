"""How an agent reaches a host's live MoE layers."""
