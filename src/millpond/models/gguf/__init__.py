"""Models in GGUF files: their headers, and their conversion to a folder that transformers loads."""
