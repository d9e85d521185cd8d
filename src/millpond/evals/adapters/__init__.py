"""Doors for other people's harnesses. A folder of its own, because its modules import what is not always installed."""
