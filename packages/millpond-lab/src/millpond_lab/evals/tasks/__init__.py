"""One file per family of tasks. Dropping a file in registers it."""
