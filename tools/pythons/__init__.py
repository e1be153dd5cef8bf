"""Tests of the wheels on every supported Python version that is installed on this machine."""
