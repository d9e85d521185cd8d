"""layer_table: budgets per layer from a table."""

from dataclasses import replace
from typing import Annotated

from millpond.errors import OptionError
from millpond.methods import method
from millpond.methods._base import based_on
from millpond.option_ranges import Range, brief
from millpond.policy.layer_allocation import LayerTable
from millpond.policy.policy import Policy

#: Weights of a table, and how many of them.
WEIGHTS, MAX_LAYERS = Range(0.0, 1e6), 1_024


@method("layer_table")
def layer_table(
    table: Annotated[str, 'weights of the layers, first to last, with semicolons between: "4;2;1;1"'] = "1",
    score: Annotated[str, "the method that chooses inside each layer: snapkv, h2o/sinks=0, ..."] = "snapkv",
) -> Policy:
    """Split the budget over the layers by a table; any method chooses inside each layer.

    Layer l keeps budget x weight_l / mean(weights) entries per KV head, so that the total is that of the same budget
    without a table. A table of entries is one of weights: with their mean as the budget every layer keeps its own
    number. Fewer weights than layers are spread evenly from the first layer to the last, with straight lines between
    them: "3;1" falls from three to one. No layer keeps less than the method protects, or more than there is; the
    others make up for it.
    """
    parts = table.split(";", MAX_LAYERS)
    try:
        weights = tuple(float(part) for part in parts)
    except ValueError:
        weights = ()
    if not weights or len(weights) > MAX_LAYERS or not all(WEIGHTS.holds(weight) for weight in weights):
        raise OptionError(
            f"layer_table: table={brief(table)} must be at most {MAX_LAYERS:,} numbers, {WEIGHTS}, with semicolons "
            'between: "4;2;1;1"'
        )
    return replace(based_on("layer_table", score), layers=LayerTable(weights))
