"""Pages of layers on a disk: extents, what stays in memory of them, and tables that come and go."""
