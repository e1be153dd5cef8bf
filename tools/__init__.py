"""Commands of the repository that no installed package needs."""
