"""`millpond bench`: commands that measure speed and memory."""
