"""Wheels and environments for tests of the package."""
