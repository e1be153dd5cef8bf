"""The wheels on every Python that the packages declare and that this machine has."""
