"""Training of head classes on a frozen model (DuoAttention)."""
