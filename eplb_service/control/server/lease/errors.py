"""Lease errors."""


class LeaseError(Exception):
    """Raised when a lease can be neither acquired nor renewed. The error message names the lease and the reason."""


class LeaseLostError(LeaseError):
    """Raised when this service has lost its lease, which another service may hold by now. The service must exit."""
