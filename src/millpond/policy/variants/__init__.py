"""Policies that need more than a score, an allocation and a merge rule."""
