"""Plans of a batch of prompts: which tokens they have in common, and in which order each is read once (BatchLLM)."""
