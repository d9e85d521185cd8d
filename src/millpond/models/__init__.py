"""Model families and model loading. Importing this package loads nothing.

Imports: codec, errors, kernels, optional, tiers.
"""
