"""`bench batch`: prompts with common beginnings, planned as a batch and in the order of their arrival."""
