"""Evaluation of quality: tasks, decoding with the evicting cache, intervals, reports.

Imports: budget, cache, codec, errors, hf, inspector, install_command, kernels, markdown, methods, models,
option_ranges, optional, peer_process, policy, registry.
"""
