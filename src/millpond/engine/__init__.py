"""Continuous batching over one page pool: scheduler, preemption, prefix sharing, sampling; `LLM` and `AsyncLLM`.

Imports: budget, cache, codec, errors, hf, kernels, methods, models, option_files, option_ranges, optional, policy,
presets, runner, scalar, setting, tiers.
"""
