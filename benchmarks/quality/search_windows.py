"""Windows of text read once with the full cache: entries, what scores are made of, and what the model then predicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from millpond_lab.evals.tasks.text import text

NAME = "millpond_search"
#: Queries whose attention is computed at once.
BLOCK = 512
#: Newest queries whose attention is summed apart.
NEWEST = (32, 128)


@dataclass
class Layer:
    """What one layer holds after the context, per KV head or query head.

    Attributes:
        keys, values: (H, N, D) bfloat16, keys after RoPE.
        sums: by name, (Hq, N) float32: attention of all queries (`all`), its squares (`squares`), of the newest ones
            (`newest32`), with forgetting (`decay`), the change of the output that each entry causes (`change`), and of
            the queries to come (`oracle`).
    """

    keys: Tensor
    values: Tensor
    sums: dict[str, Tensor]


@dataclass
class Window:
    """One window: its layers, and the predictions of the full cache.

    Attributes:
        n: tokens of the context.
        ids: (T,) what follows it. The first of them is predicted by the pass over the context, whatever is evicted.
        logprobs: (T - 1, V) float16 of the full cache, of all but the first. nll: (T - 1,) float32.
    """

    name: str
    n: int
    ids: Tensor
    layers: list[Layer]
    logprobs: Tensor
    nll: Tensor


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass
class _Current:
    """The function that layers attend with now: (layer, q (Hq, Q, D), k (H, Q, D), v) to (Hq, Q, D)."""

    attend: Attend | None = None
    ready: bool = field(default=False)


_CURRENT = _Current()


def _forward(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    assert _CURRENT.attend is not None
    out = _CURRENT.attend(module.layer_idx, query[0], key[0], value[0])
    return out.transpose(0, 1)[None].contiguous(), None


@torch.no_grad()
def run(model: PreTrainedModel, ids: Tensor, first: int, attend: Attend, logits: bool = True) -> Tensor | None:
    """Log-probabilities (T, V) after each of the tokens ids (T,), whose positions begin at `first`."""
    if not _CURRENT.ready:
        AttentionInterface.register(NAME, _forward)
        _CURRENT.ready = True
    model.set_attn_implementation(NAME)
    _CURRENT.attend = attend
    positions = torch.arange(first, first + len(ids))[None]
    hidden = model.model(ids[None], position_ids=positions, use_cache=False).last_hidden_state[0]
    return torch.log_softmax(model.lm_head(hidden).float(), -1) if logits else None


def over(q: Tensor, keys: Tensor, before: int) -> Tensor:
    """Weights (Hq, Q, M): queries (Hq, Q, D) over keys (H, M, D), of which the last Q are the queries' own.

    Args:
        before: how many of the keys every query may see.
    """
    heads = len(keys)
    logits = q.reshape(heads, -1, q.shape[-1]) @ keys.transpose(1, 2) / q.shape[-1] ** 0.5
    logits = logits.view(len(q), q.shape[1], -1)
    hidden = torch.arange(keys.shape[1])[None, :] > before + torch.arange(q.shape[1])[:, None]
    return logits.masked_fill_(hidden, -torch.inf).softmax(-1)


def mixed(weights: Tensor, values: Tensor) -> Tensor:
    """The outputs (Hq, Q, D) of weights (Hq, Q, M) over values (H, M, D)."""
    heads = len(values)
    return (weights.reshape(heads, -1, weights.shape[-1]) @ values).view(len(weights), weights.shape[1], -1)


def record(model: PreTrainedModel, context: Tensor, following: Tensor, name: str, decay: float = 0.999) -> Window:
    """Read a window: its context (N,), and then what follows (T,) with all of the context in the cache."""
    layers: list[Layer] = []
    n = len(context)

    def read(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = len(q) // len(k)
        sums = {what: torch.zeros(len(q), n) for what in ("all", "squares", "decay", "change")}
        sums |= {f"newest{count}": torch.zeros(len(q), n) for count in NEWEST}
        norms = v.square().sum(-1).repeat_interleave(group, 0)
        parts = []
        for begin in range(0, n, BLOCK):
            end = min(n, begin + BLOCK)
            a = over(q[:, begin:end], k[:, :end], begin)
            out = mixed(a, v[:, :end])
            parts.append(out)
            sums["all"][:, :end] += a.sum(1)
            sums["squares"][:, :end] += a.square().sum(1)
            ages = n - 1 - torch.arange(begin, end)
            sums["decay"][:, :end] += (a * (decay**ages)[None, :, None]).sum(1)
            for count in NEWEST:
                sums[f"newest{count}"][:, :end] += a[:, ages < count].sum(1)
            # ||A / (1 - A) (v - o)||^2, summed over queries: what leaving the entry out does to each output
            odds = (a / (1 - a).clamp(min=1e-3)).square_()
            cross = (out.view(len(k), -1, v.shape[-1]) @ v[:, :end].transpose(1, 2)).view_as(a)
            gap = norms[:, None, :end] - 2 * cross + out.square().sum(-1, keepdim=True)
            sums["change"][:, :end] += (odds * gap.clamp(min=0)).sum(1)
        layers.append(Layer(k.bfloat16(), v.bfloat16(), sums))
        return torch.cat(parts, 1)

    run(model, context, 0, read, logits=False)

    def judge(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layer = layers[index]
        a = over(q, torch.cat([layer.keys.float(), k], 1), n)
        layer.sums["oracle"] = a[:, :, :n].sum(1)
        return mixed(a, torch.cat([layer.values.float(), v], 1))

    logprobs = run(model, following[:-1], n, judge)
    assert logprobs is not None
    nll = -logprobs.gather(1, following[1:, None])[:, 0]
    return Window(name, n, following, layers, logprobs.half(), nll)


def windows_of(
    model: PreTrainedModel, tokenizer: Any, path: str, context: int, following: int, count: int, seed: int
) -> list[Window]:
    """The first `count` windows that `millpond eval` reads of a text under this seed."""
    task = text(path=path, context_len=context, continuation_len=following, stride=context + following)
    found = []
    for sample in task.samples(tokenizer, count, seed):
        ids, fed = torch.tensor(sample.tokens), torch.tensor(sample.questions[0].tokens)
        found.append(record(model, ids, fed, f"{path.rsplit('/', 1)[-1]}:{sample.id}"))
    return found
