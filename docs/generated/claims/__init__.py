"""What papers claim, and what came out when it was tried here, by subject; `table` has them all."""
