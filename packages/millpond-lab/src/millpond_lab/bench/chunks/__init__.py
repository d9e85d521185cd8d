"""`bench chunks`: prompts of stored chunks, their time to the first token and what a steady stream of them computes."""
