"""Retaining heads (Locret): small trained networks that score an entry when it is written."""
