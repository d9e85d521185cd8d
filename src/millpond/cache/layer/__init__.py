"""The cache of one layer: prefill, decode steps, drafts and latents."""
