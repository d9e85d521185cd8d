"""Images of prompts: limits, data: URLs, headers that are read before anything is decoded, and pictures for a model."""
