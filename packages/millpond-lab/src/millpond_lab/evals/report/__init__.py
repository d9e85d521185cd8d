"""Reports of results: claims, curves, Pareto fronts, leaderboard."""
