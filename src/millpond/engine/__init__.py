"""Continuous batching over one page pool: scheduler, preemption, prefix sharing, sampling; `LLM` and `AsyncLLM`.

Imports: budget, cache, codec, errors, hf, kernels, methods, models, option_files, optional, policy, runner, scalar,
tiers.
"""
