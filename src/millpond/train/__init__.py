"""Training of the bundled models, their data, and their own measures. Importing this package loads nothing.

Imports: errors, hf, kernels, markdown, models, policy.
"""
