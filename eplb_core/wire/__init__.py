"""Wire format: each message as a frozen dataclass that is encoded, decoded and validated here."""
