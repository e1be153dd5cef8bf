"""Who may call, and how much of the service a caller may take."""
