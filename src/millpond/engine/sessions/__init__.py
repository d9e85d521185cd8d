"""Sessions: caches of finished turns on the disk, from which later requests continue, also after a restart."""
