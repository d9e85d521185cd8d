"""Training of networks over hidden states on a frozen model (KVzap)."""
