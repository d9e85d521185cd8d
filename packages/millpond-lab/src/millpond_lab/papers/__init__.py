"""Published models of cost and time, rule by rule, as checks of ours."""
