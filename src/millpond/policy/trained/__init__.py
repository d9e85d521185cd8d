"""Trained networks of policies (Attention-Gate, Locret) and their files."""
