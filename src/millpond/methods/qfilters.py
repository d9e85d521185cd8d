"""Q-Filters: one direction per head along which keys draw attention (Godey et al., 2025, arXiv:2503.02812)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from millpond.errors import CacheMismatchError, OptionError
from millpond.kernels.decode_rules import Evict, Signal
from millpond.methods import method
from millpond.methods._options import Chunk, ChunkedPrefill, Recent
from millpond.option_files import FILE, read_file
from millpond.option_ranges import POSITIONS
from millpond.policy.policy import Policy
from millpond.policy.protect import Protect
from millpond.policy.scores.attention import Queries
from millpond.policy.scores.query_moments import QueryMoments, moments_of
from millpond.policy.view import View


@dataclass(frozen=True, slots=True, eq=False)
class QueryFilter:
    """s_j = <k_j, f>: f the direction of the text's queries after RoPE, or a given one.

    Attributes:
        filters: (layers, KV heads, key_dim); None: those of the queries so far.
    """

    filters: Tensor | None = None
    window: int = 0
    signal: Signal = Signal.NONE
    evict: Evict | None = None

    @property
    def queries(self) -> Queries:
        return "rotated" if self.filters is None else "none"

    def score(self, view: View, seed: int) -> Tensor:
        """Return (H, N) float32: <k_j, f>.

        Raises:
            CacheMismatchError: the filters are of another model.
        """
        keys = view.keys
        if self.filters is None:
            direction = query_directions(moments_of(view)[1], len(keys))
        else:
            direction = self._given(view.layer, keys)
        return (keys * direction.to(keys)[:, None]).sum(-1)

    def _given(self, layer: int, keys: Tensor) -> Tensor:
        assert self.filters is not None
        n_layers, *shape = self.filters.shape
        if layer >= n_layers or shape != [len(keys), keys.shape[-1]]:
            raise CacheMismatchError(
                f"layer {layer} has keys of {len(keys)} heads x {keys.shape[-1]} numbers; the filters are of "
                f"{n_layers} layers with {shape[0]} x {shape[1]}: take those of this model"
            )
        return self.filters[layer]


def query_directions(moments: QueryMoments, n_kv_heads: int) -> Tensor:
    """Return (H, D) float64: the main direction of the queries of each KV head.

    It is the first right singular vector of each query head's queries, averaged over its group. Its sign is the one
    with which the mean query has a positive projection.
    """
    first: Tensor = torch.linalg.eigh(moments.outer.nan_to_num())[1][..., -1]  # of Q^T Q, ascending
    along = (first * moments.mean).sum(-1, keepdim=True)  # NaN stays NaN, for the plan to report
    signed = torch.where(along < 0, -first, first) + 0 * along
    return signed.view(n_kv_heads, -1, signed.shape[-1]).mean(1)


@method("qfilters", paper="arXiv:2503.02812")
def qfilters(
    filters: Annotated[str, "a .safetensors file of (layers, KV heads, head size); empty: the prompt's own", FILE] = "",
    flip: Annotated[bool, "the file's filters point away from the queries, as those that the authors publish"] = False,
    recent: Recent = 0,
    sinks: Annotated[
        int, "first positions that always stay, and whose queries do not count; the paper has none", POSITIONS
    ] = 0,
    prefill: ChunkedPrefill = "once",
    chunk: Chunk = 256,
    decode: Annotated[Literal["grow", "evict"], "after the prompt: grow, or evict at each step"] = "grow",
) -> Policy:
    """Keep entries whose keys point in the direction of queries, for any later question.

    s_j = <k_j, f>. f is the first right singular vector of a head's queries, with the sign that gives them a positive
    mean, averaged over the query heads of a group: the mean logit of key j is proportional to it (Theorem 3.3). No
    attention is observed; queries and keys are compared after RoPE.

    Departs from the paper: it finds the filters once per model, from queries of calibration texts. Here they are the
    prompt's own, unless a file names others; `millpond.hf.offline` writes such a file from any prompts.
    With decode="evict" filters of the prompt follow the queries; each step ends with a plan, and is slow.
    """
    return Policy(
        score=QueryFilter(_load(filters, flip)),
        protect=Protect(sinks=sinks, recent=recent),
        prefill=prefill,
        chunk=chunk,
        every_step=decode == "evict",
    )


def _load(path: str, flip: bool) -> torch.Tensor | None:
    if not path:
        if flip:
            raise OptionError("qfilters: flip turns the filters of a file round; name one with filters")
        return None
    try:
        tensors = load(read_file(path))
    except (OptionError, SafetensorError) as error:
        raise OptionError(f"qfilters: filters={path!r} cannot be read as a .safetensors file: {error}") from None
    shapes = [tuple(tensor.shape) for tensor in tensors.values()]
    if len(shapes) != 1 or len(shapes[0]) != 3:
        raise OptionError(
            f"qfilters: filters={path!r} must hold one tensor of (layers, KV heads, head size); it has {shapes}"
        )
    (filters,) = tensors.values()
    return -filters if flip else filters
