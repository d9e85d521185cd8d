"""Memory and disk as tiers: ledger, aligned slots, direct files, and a loader that fills slots in the background."""
