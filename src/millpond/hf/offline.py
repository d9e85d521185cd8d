"""Patterns and filters computed from a model before it is used, and stored in a file (MInference, Q-Filters)."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from millpond.errors import OptionError, UnsupportedModelError
from millpond.hf.attention import switch
from millpond.hf.cache import MillpondCache
from millpond.hf.compress import compress
from millpond.hf.model_profile import ModelProfile
from millpond.kernels.args import AttentionShape
from millpond.methods.minference import make_pattern
from millpond.methods.qfilters import query_directions
from millpond.models.cache_argument import cache_argument
from millpond.policy.needs import BLOCK, HeadPrompt, Pattern

#: Candidates of the search: kind and two numbers. A query reads some 800 entries with each.
CANDIDATES = (
    ("a_shape", 100, 800),
    ("vertical_slash", 30, 800),
    ("vertical_slash", 100, 750),
    ("vertical_slash", 500, 700),
    ("vertical_slash", 3500, 100),
    ("block_sparse", 14, 1),
)


def find_patterns(
    model: PreTrainedModel,
    ids: Tensor,
    path: str | Path,
    *,
    candidates: Sequence[tuple[str, int, int]] = CANDIDATES,
    after: int = 2500,
) -> None:
    """Find the pattern of each head that keeps most attention, and write them to a file.

    The file is for `compress(model, "minference", patterns=path)`. The attention of the queries after position `after`
    that falls on what they would read is averaged for every candidate; the first of the best is written, with that
    number. Layers with a sliding window are left out.

    Args:
        model: Model to measure.
        ids: Ids of a long text without pads, (1, n).
        path: Path of the JSON file.
        candidates: Kind and two numbers of each pattern to choose from.
        after: Position of the first query that counts.

    Raises:
        OptionError: the text ends before `after`, there is more than one, or a candidate is no pattern.
    """
    if ids.shape[0] != 1 or ids.shape[1] <= after:
        raise OptionError(f"ids of shape {tuple(ids.shape)}: give one text of more than after={after} tokens")
    patterns = [make_pattern(*candidate) for candidate in candidates]
    layers: dict[int, dict[str, tuple[str, int, int, float]]] = {}

    def observe(layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shape: AttentionShape) -> None:
        group = q.shape[1] // k.shape[1]
        layers[layer] = {}
        for head in range(0 if shape.window else q.shape[1]):
            sink = None if shape.sink_logits is None else shape.sink_logits[head]
            prompt = HeadPrompt(q[0, head], k[0, head // group], shape.scale, shape.softcap, sink)
            shares = [share_kept(prompt, pattern, after) for pattern in patterns]
            best = shares.index(max(shares))
            layers[layer][str(head)] = (*candidates[best], shares[best])

    with torch.no_grad(), compress(model, "full") as cache:
        cache.watch(observe)
        model(ids, **cache_argument(cache), logits_to_keep=1)
    Path(path).write_text(json.dumps([layers[layer] for layer in sorted(layers)]), encoding="utf-8")


def share_kept(prompt: HeadPrompt, pattern: Pattern, after: int) -> float:
    """Return the share of attention that falls on what queries read with a pattern.

    It is the mean over the queries from position `after` on.
    """
    look, n, total = pattern.look(prompt), len(prompt.k), 0.0
    for begin in range(prompt.first, n, BLOCK):
        end = min(begin + BLOCK, n)
        if end <= after:
            continue
        part = prompt._replace(q=prompt.q[: end - prompt.first], k=prompt.k[:end])
        p, columns = part.last_rows(end - begin), look(begin, end)
        seen = torch.zeros_like(p).bool()
        seen[:, columns] = True
        if pattern.near is not None:
            first, width = pattern.near
            row = torch.arange(begin, end, device=p.device)[:, None]
            column = torch.arange(end, device=p.device)
            seen &= (column < first) | (row - column < width)
        total += float(p.masked_fill(~seen, 0)[max(after - begin, 0) :].sum())
    return total / (n - max(after, prompt.first))


NAME = "millpond_later_tokens"

#: attend(layer, q, k, v): q (query heads, m, key_dim), k (KV heads, m, key_dim) and v (KV heads, m, value_dim) of the
#: later tokens, after RoPE, of the layers with attention in their order -> (query heads, m, value_dim).
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class _Running(threading.local):
    """Call of `read_later` that runs in this thread."""

    attend: Attend | None = None
    layer: int = 0


_running = _Running()


def read_later(model: PreTrainedModel, ids: Tensor, begin: int, attend: Attend, last: int = 0) -> Tensor:
    """Return the logits of tokens ids (m,) from position `begin` on, (m, vocabulary).

    Gradients flow through `attend`. The weights of the model are constants. No cache is used, so `attend` determines
    all that these tokens see.

    Args:
        model: Model that reads.
        ids: Token ids (m,).
        begin: Position of the first one.
        attend: Attention of each layer, see `Attend`.
        last: Logits of that many last tokens alone; 0 for those of all.

    Raises:
        UnsupportedModelError: an attention that is given more than queries, keys and values, or that never came.
    """
    profile = ModelProfile.of(model)
    if "position_ids" not in profile.arguments:
        raise UnsupportedModelError(f"{profile.name} takes no position_ids, so later tokens cannot be read alone")
    if NAME not in AttentionInterface._global_mapping:
        AttentionInterface.register(NAME, _attention)
        AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
    positions = torch.arange(begin, begin + len(ids), device=model.device)
    few = {"logits_to_keep": last} if last and "logits_to_keep" in profile.arguments else {}
    undo = switch(profile.config, NAME)
    _running.attend, _running.layer = attend, 0
    try:
        with _constant(model):
            out = model(input_ids=ids[None].to(model.device), position_ids=positions[None], use_cache=False, **few)
        if _running.layer != profile.n_layers:
            raise UnsupportedModelError(
                f"{profile.name} has {profile.n_layers} layers with attention, and {_running.layer} of them use "
                "transformers' attention interface"
            )
    finally:
        _running.attend = None
        undo()
    logits: Tensor = out.logits[0, -last:]
    return logits


@contextmanager
def _constant(model: PreTrainedModel) -> Iterator[None]:
    """Keep the weights of the model from taking gradients inside the block."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention of one layer by the function of the running call.

    Shapes are as in transformers.
    """
    assert _running.attend is not None, "the model is switched for one call"
    if dropout or position_bias is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} drops attention out or adds a position bias, which is not followed here; call "
            "model.eval() first, or take another model"
        )
    layer, _running.layer = _running.layer, _running.layer + 1
    out = _running.attend(layer, query[0], key[0], value[0])
    return out.to(query.dtype).transpose(0, 1)[None].contiguous(), None


def save_filters(cache: MillpondCache, path: str | Path) -> None:
    """Write the filters of all prompts of a cache's batch to a file.

    The file is for `compress(model, "qfilters", filters=path)`.

    Args:
        cache: Cache of the method qfilters, after its prompts.
        path: Path of the .safetensors file, of float32 numbers (layers, KV heads, head size).

    Raises:
        CacheMismatchError: the cache has seen no prompt, or its method finds no filters.
    """
    filters = []
    for layer_cache in cache.layer_caches:
        total = layer_cache.moments(0)
        for sequence in range(1, cache.tracker.n_seq):
            total = total + layer_cache.moments(sequence)
        filters.append(query_directions(total, layer_cache.stored.shape[1]).float().cpu())
    save_file({"q_filters": torch.stack(filters)}, path)
