"""Credentials of callers, and quotas on the resources that callers use."""
