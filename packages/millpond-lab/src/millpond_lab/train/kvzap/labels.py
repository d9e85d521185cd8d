"""What KVzap learns: hidden states of a text, and how much a repetition of it reads each entry (KVzip+).

Source: arXiv:2601.07891, Equation 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millpond.errors import DataError
from millpond.hf.attention_inputs import AttentionInputs
from millpond.hf.compress import compress
from millpond.hf.model_profile import ModelProfile
from millpond.hf.model_support import supported
from millpond.hf.signals.output_projection import layer_output_maps
from millpond.kernels.args import AttentionShape
from millpond.models.cache_argument import cache_argument

#: Queries whose logits are in memory at a time.
BLOCK = 64


class LayerSample(NamedTuple):
    """What one layer made of a text of n tokens."""

    hidden: Tensor  #: (n, width) float32
    labels: Tensor  #: (n, KV heads) float32, log s+


@dataclass(frozen=True)
class RepeatReader:
    """Readings of texts and their repetitions by a frozen model.

    Attributes:
        model: what is read with. ask: token ids of the request between a text and its repetition.
    """

    model: PreTrainedModel
    ask: Sequence[int]

    def read(self, ids: Tensor) -> list[LayerSample]:
        """Hidden states and labels of the tokens ids (n,), layer by layer, from one pass over text and repetition.

        Raises:
            DataError: a text of less than two tokens.
            UnsupportedModelError: a model whose attention modules or output projections cannot be read.
        """
        if len(ids) < 2:
            raise DataError(f"a text of {len(ids)} tokens has nothing to repeat; give longer ones")
        profile = supported(self.model)
        begins = int(int(ids[0]) in profile.begin_tokens)  # the token that begins a text is not repeated in the middle
        whole = torch.cat([ids, torch.tensor(list(self.ask), dtype=ids.dtype), ids[begins:]]).to(self.model.device)
        first, found = len(ids) + len(self.ask), {}
        keep = {"logits_to_keep": 1} if "logits_to_keep" in profile.arguments else {}
        inputs = AttentionInputs(profile)

        def look(layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shape: AttentionShape) -> None:
            nth = profile.attending.index(layer)
            hidden = inputs.take(nth)[0].float()
            labels = repeat_labels(
                q[0, :, first:], k[0], v[0, :, : len(ids)], layer_output_maps(profile, nth), hidden[first:], shape
            )
            found[layer] = LayerSample(hidden[: len(ids)], labels.T)

        with closing(inputs), torch.no_grad(), compress(self.model, "full") as cache:
            cache.watch(look)
            self.model(whole[None], **cache_argument(cache), use_cache=True, **keep)
        return [found[layer] for layer in sorted(found)]

    def shapes(self) -> list[tuple[int, int]]:
        """Numbers of a hidden state and KV heads of each layer, learned from two tokens."""
        return shapes_of(self.model)


def shapes_of(model: PreTrainedModel) -> list[tuple[int, int]]:
    """Numbers of a hidden state and KV heads of each layer, learned from a pass over two tokens."""
    profile, found = ModelProfile.of(model), {}
    inputs = AttentionInputs(profile)

    def look(layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shape: AttentionShape) -> None:
        found[layer] = inputs.take(profile.attending.index(layer)).shape[-1], k.shape[1]

    with closing(inputs), torch.no_grad(), compress(model, "full") as cache:
        cache.watch(look)
        model(torch.tensor([[1, 2]], device=model.device), **cache_argument(cache), use_cache=True)
    return [found[layer] for layer in sorted(found)]


def repeat_labels(q: Tensor, k: Tensor, v: Tensor, outputs: Tensor, hidden: Tensor, shape: AttentionShape) -> Tensor:
    """Log of s+_j = max_i max_h A_hij |v_j W_h| / |h_i| over repeating tokens i and the heads h of the group.

    Args:
        q: (query heads, m, key_dim), of the last m positions, which repeat. k: (KV heads, N, key_dim). After RoPE.
        v: (KV heads, n, value_dim), of the n entries that get a label.
        outputs: (query heads, value_dim, width), the output projection. hidden: (m, width), what attention read of
            the repeating tokens. shape: what attention does besides softmax(q k / sqrt d).

    Returns:
        (KV heads, n) float32.
    """
    (n_heads, m, _), (n_kv_heads, total, _), n = q.shape, k.shape, v.shape[1]
    group = n_heads // n_kv_heads
    grouped, keys = q.float().view(n_kv_heads, group, m, -1), k.float().transpose(1, 2)[:, None]
    maps = outputs.float().view(n_kv_heads, group, *outputs.shape[1:])
    lengths = torch.stack([(v.float() @ maps[:, g]).norm(dim=-1) for g in range(group)], 1).clamp(min=1e-12).log()
    divisors = hidden.float().norm(dim=-1).clamp(min=1e-12).log()
    places = torch.arange(total, device=k.device)
    best = torch.full((n_kv_heads, n), -torch.inf, device=k.device)
    for begin in range(0, m, BLOCK):
        rows = slice(begin, min(begin + BLOCK, m))
        at = places[total - m :][rows, None]
        logits = grouped[:, :, rows] @ keys * shape.scale
        if shape.softcap:
            logits = shape.softcap * torch.tanh(logits / shape.softcap)
        seen = places <= at
        if shape.window:
            seen &= at - places < shape.window
        logits = logits.masked_fill(~seen, -torch.inf)
        sums = logits.logsumexp(-1, keepdim=True)
        if shape.sink_logits is not None:
            sums = torch.logaddexp(sums, shape.sink_logits.to(logits).view(n_kv_heads, group, 1, 1))
        shares = (logits - sums)[..., :n] + lengths[:, :, None] - divisors[rows, None]
        best = best.maximum(shares.amax((1, 2)))
    lowest = torch.where(best.isinf(), torch.inf, best).amin()
    return torch.where(best.isinf(), lowest, best)  # hidden by a window: like the least that is seen
