"""Operations on stored entries: reading, replacing, compacting, quantizing and scoring them."""
