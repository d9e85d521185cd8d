"""Budgets of heads and layers: how a budget is shared out."""
