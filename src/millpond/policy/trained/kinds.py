"""Kinds of trained networks in files: their parts, and the shapes that these must have."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from millpond.policy.trained.gelu_score import GeluScore
from millpond.policy.trained.hidden_networks import HiddenNetwork
from millpond.policy.trained.linear_score import LinearScore
from millpond.policy.trained.networks import QUANTILE_STEPS, LayerGate, LayerHeads
from millpond.policy.trained.sink_gate import SinkGate

#: Shapes of the parts of one layer.
Shapes = dict[str, list[int]]


class NetworkKind(NamedTuple):
    """Kind of networks: `kind` in their files, name in errors, and names of their parts.

    Attributes:
        fitting: Returns the shapes that the parts of one layer must have, given those of the first ones.
        exact: Parts that are stored in float32.
        made_by: Words behind `millpond train` in the command that makes them. Without any it is the name.
    """

    name: str
    things: str
    parts: tuple[str, ...]
    fitting: Callable[[Shapes], Shapes]
    exact: tuple[str, ...] = ()
    made_by: str = ""

    @property
    def command(self) -> str:
        """Command that makes them."""
        return f"'millpond train {self.made_by or self.name}'"


def _two_layers(shapes: Shapes) -> Shapes:
    width, inputs = shapes["w1"]
    n_heads = shapes["b2"][0]
    return {"w1": [width, inputs], "b1": [width], "w2": [n_heads, width], "b2": [n_heads]}


def _retaining(shapes: Shapes) -> Shapes:
    return _two_layers(shapes) | {"quantiles": [shapes["b2"][0], QUANTILE_STEPS + 1]}


def _gate(shapes: Shapes) -> Shapes:
    _, inputs = shapes["w1"]
    narrow, taken = shapes["wk"]
    together = shapes["wq"][0]
    if inputs != taken + together or together % narrow:
        raise ValueError(f"{inputs} inputs are not {taken} and those of whole heads of {narrow}")
    return _two_layers(shapes) | {"wq": [together, taken], "wk": [narrow, taken], "wv": [narrow, taken]}


def _linear(shapes: Shapes) -> Shapes:
    n_heads, inputs = shapes["w"]
    return {"w": [n_heads, inputs], "b": [n_heads]}


def _sink_gate(shapes: Shapes) -> Shapes:
    (n_heads, group), (_, n_sinks, width), (_, inputs) = shapes["bias"], shapes["sinks"], shapes["wk"]
    return {
        "wq": [n_heads * group * width, inputs],
        "bq": [n_heads * group * width],
        "wk": [n_heads * width, inputs],
        "q_norm": [width],
        "k_norm": [width],
        "sinks": [n_heads, n_sinks, width],
        "bias": [n_heads, group],
    }


RETAIN = NetworkKind("retain", "heads", LayerHeads.PARTS, _retaining, ("quantiles",))
GATE = NetworkKind("gate", "gates", LayerGate.PARTS, _gate, ("b2",))
LINEAR = NetworkKind("kvzap-linear", "networks", LinearScore.PARTS, _linear, LinearScore.PARTS, "kvzap")
GELU = NetworkKind("kvzap-mlp", "networks", GeluScore.PARTS, _two_layers, ("b2",), "kvzap")
SINK_GATE = NetworkKind(
    "fastkvzip", "gates", SinkGate.PARTS, _sink_gate, ("q_norm", "k_norm", "sinks", "bias"), "import"
)
#: Networks over hidden states, by their kind.
OVER_HIDDEN: dict[NetworkKind, Callable[..., HiddenNetwork]] = {
    LINEAR: LinearScore,
    GELU: GeluScore,
    SINK_GATE: SinkGate,
}


def kind_of_network(network: HiddenNetwork) -> NetworkKind:
    """Return the kind of a network over hidden states."""
    return next(kind for kind, made in OVER_HIDDEN.items() if type(network) is made)
