"""What is kept: scores, protection, allocation and selection. Sees numbers (scores, positions), never pages."""
