"""`millpond cluster`: plans for more than one worker."""
