"""The engine: many requests over one page pool, and the doors to it, `LLM` and `AsyncLLM`."""
