"""Plots of results, one file per figure."""

from millpond.optional import require

require("matplotlib", "plot", "drawing")
