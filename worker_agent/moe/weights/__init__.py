"""The tensors of a rank's experts: where they come from, how checkpoints fill them, what moves with an expert."""
