"""The wire contract: each message as a frozen dataclass, encoded and decoded side by side, every field checked here."""
