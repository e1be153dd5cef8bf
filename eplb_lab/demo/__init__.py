"""The demo's stage: starts rank processes beside a service, keeps score of their balance, and shows it."""
