"""Training of gates and of head classes on a frozen model (Attention-Gate, DuoAttention)."""
