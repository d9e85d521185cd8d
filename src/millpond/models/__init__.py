"""Model families and model loading. Importing this package loads nothing.

Imports: codec, errors, install_command, kernels, optional, tiers.
"""
