"""Constrained answers: schemas and patterns checked, compiled in a process of their own, enforced per token."""
