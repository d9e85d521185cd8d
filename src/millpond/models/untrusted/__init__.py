"""Checks of strangers' files: folders of models, their configurations and their chat templates."""
