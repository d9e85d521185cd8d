"""Shared parts of training: checkpoints, optimizer, progress bars."""
