"""Training of retaining heads on a frozen model (Locret)."""
