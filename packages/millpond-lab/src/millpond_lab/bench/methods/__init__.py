"""`bench methods`: the cost of a decode step and of a plan, method by method."""
