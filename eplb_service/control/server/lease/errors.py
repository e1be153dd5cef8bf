"""Errors of leases."""


class LeaseError(Exception):
    """A lease that can currently be neither acquired nor renewed. The message names the lease and the reason."""


class LeaseLostError(LeaseError):
    """A lease that this service held and that another service may have acquired by now. The service must exit."""
