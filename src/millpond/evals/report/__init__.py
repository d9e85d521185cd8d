"""Reports: claims, curves, Pareto fronts, leaderboard."""
