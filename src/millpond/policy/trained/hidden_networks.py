"""Networks that score an entry by the hidden state that its attention layer reads (KVzap, Fast KVzip)."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from millpond.errors import CacheMismatchError
from millpond.policy.trained.networks import LayerNetwork, TrainedNetworks, rounded


class HiddenNetwork(LayerNetwork, Protocol):
    """Network of one layer over its hidden states."""

    @property
    def inputs(self) -> int:
        """Numbers of a hidden state."""
        ...

    @property
    def n_scored(self) -> int:
        """KV heads that are scored."""
        ...

    def raw(self, hidden: Tensor) -> Tensor:
        """Return (n, KV heads) float32: scores of tokens with hidden states (n, inputs)."""
        ...


class HiddenNetworks(TrainedNetworks[HiddenNetwork]):
    """Networks of a model, all of one kind, and facts about how they were made."""

    __slots__ = ()

    def scores(self, layer: int, hidden: Tensor, n_kv_heads: int) -> Tensor:
        """Return (B, KV heads, n) float32: scores of new tokens, in `SCORE_DIGITS` digits.

        Args:
            layer: Index of the attention layer.
            hidden: (B, n, width), what its attention module reads of the tokens: normed hidden states.
            n_kv_heads: KV heads of the layer.

        Raises:
            CacheMismatchError: the networks are of a model of another shape.
        """
        network = self.at(layer, hidden, n_kv_heads)
        batch, n = hidden.shape[:2]
        return rounded(network.raw(hidden.flatten(0, 1)).float()).view(batch, n, -1).transpose(1, 2)


def check_shape(network: HiddenNetwork, layer: int, inputs: int, n_kv_heads: int) -> None:
    """Check the hidden states and KV heads of a layer, see `LayerNetwork.check`.

    Raises:
        CacheMismatchError: the network takes others.
    """
    if (inputs, n_kv_heads) != (network.inputs, network.n_scored):
        raise CacheMismatchError(
            f"layer {layer} has hidden states of {inputs} numbers and {n_kv_heads} KV heads; this network takes "
            f"{network.inputs} and scores {network.n_scored}: take those of this model"
        )
