"""Checks of what strangers wrote: folders of models, their configurations and their chat templates."""
