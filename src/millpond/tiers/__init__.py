"""Memory and disk as tiers: what lies where, aligned slots, direct files, and a loader that fills slots in the background.

Imports: errors.
"""
