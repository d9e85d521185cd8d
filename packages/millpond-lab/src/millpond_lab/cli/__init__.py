"""Commands that the lab adds to `millpond`: bench, cluster, eval, eval-peer, fit, leaderboard, lm-eval, plot, train."""
