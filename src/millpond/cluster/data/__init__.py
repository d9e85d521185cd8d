"""Answers for the rows of a dataset: an engine that is kept full, and the stage of Ray Data around it."""
