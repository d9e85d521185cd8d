"""Continuous batching over one page pool: scheduler, preemption, prefix sharing, sampling; `LLM` and `AsyncLLM`."""
