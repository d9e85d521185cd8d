"""Training of the bundled models, their data, and their own measures. Importing this package loads nothing.

Imports: cache, errors, hf, kernels, markdown, models, policy.
"""
