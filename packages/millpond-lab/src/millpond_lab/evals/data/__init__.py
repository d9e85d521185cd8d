"""Texts and questions of tasks: generated, bundled and from files."""
