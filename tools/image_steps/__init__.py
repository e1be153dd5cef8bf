"""Carries out the Dockerfile's steps where no container runtime is: in directories that chroot makes roots of."""
