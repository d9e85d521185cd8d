"""Fast KVzip: the gate by hand and against its formula, and what stays by it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import millpond as mp
from millpond.policy.trained.file import hidden_networks_of, save_heads
from millpond.policy.trained.sink_gate import SinkGate
from millpond_lab.bench.methods.candidate import random_networks
from tests.helpers.hf.normed import attention_inputs
from tests.helpers.matrix.models import llama

pytestmark = pytest.mark.filterwarnings("ignore::millpond.hf.layer_budgets.FewEntriesWarning")


def gate(n_heads: int = 1, group: int = 1, d: int = 2, n_sinks: int = 16, inputs: int = 2) -> SinkGate:
    """A gate as the authors begin to train it: z = 0, no sinks, no bias."""
    large = torch.zeros(n_heads * group * d, inputs), torch.zeros(n_heads * group * d), torch.zeros(n_heads * d, inputs)
    return SinkGate(*large, torch.ones(d), torch.ones(d), torch.zeros(n_heads, n_sinks, d), torch.zeros(n_heads, group))


def test_a_gate_begins_at_one_of_seventeen() -> None:
    """16 sinks of logit 0 against one token of logit 0: 1 / 17 = 0.0588."""
    assert gate(2, 3).raw(torch.randn(5, 2)).flatten().tolist() == pytest.approx([1 / 17] * 10)


def test_by_hand() -> None:
    """One head, one sink, d = 2: q = k = (1, 1) behind the norm, z = 2 / sqrt 2 + b, sink logit s . q / sqrt 2."""
    one = replace(
        gate(n_sinks=1),
        wq=torch.eye(2),
        wk=torch.eye(2),
        sinks=torch.tensor([[[1.0, 0.0]]]),
        bias=torch.tensor([[0.5]]),
    )
    z, base = 2 / math.sqrt(2) + 0.5, 1 / math.sqrt(2)
    assert float(one.raw(torch.tensor([[3.0, 3.0]]))) == pytest.approx(1 / (1 + math.exp(base - z)), abs=1e-5)


def plain(network: SinkGate, h: Tensor) -> Tensor:
    """The card's formula, head by head and token by token, in float64."""
    (n_heads, group), d = network.bias.shape, len(network.k_norm)
    wq, bq, wk, q_norm, k_norm, sinks, bias = (getattr(network, part).double() for part in SinkGate.PARTS)

    def normed(x: Tensor, factors: Tensor) -> Tensor:
        return x / (x.square().mean() + 1e-6).sqrt() * factors

    out = torch.zeros(n_heads, len(h), dtype=torch.float64)
    for token, x in enumerate(h.double()):
        for head in range(n_heads):
            k = normed(wk[head * d : (head + 1) * d] @ x, k_norm)
            for member in range(group):
                rows = slice((head * group + member) * d, (head * group + member + 1) * d)
                q = normed(wq[rows] @ x + bq[rows], q_norm)
                z = q @ k / d**0.5 + bias[head, member]
                out[head, token] += 1 / (1 + (sinks[head] @ q / d**0.5 - z).exp().sum()) / group
    return out


def test_what_stays_is_what_the_formula_scores_highest(tmp_path: Path) -> None:
    model = llama("gqa", torch.float32)
    ids = 3 + torch.randperm(93, generator=torch.Generator().manual_seed(0))[None, :60]
    drawn = random_networks(model, "sink-gate")
    draw = torch.Generator().manual_seed(1)
    layers = [
        replace(
            g,
            **{
                part: torch.randn(getattr(g, part).shape, generator=draw) for part in ("bq", "q_norm", "k_norm", "bias")
            },
        )
        for g in drawn.layers
        if isinstance(g, SinkGate)
    ]
    file = tmp_path / "gates.safetensors"
    save_heads(type(drawn)(layers, drawn.model, drawn.name), file)
    stored = hidden_networks_of(file.read_bytes(), "here")
    options = {"networks": str(file), "sinks": 1, "recent": 3, "compete": "layer"}
    with torch.no_grad(), mp.compress(model, "fastkvzip", 16, **options) as cache:
        model(ids, cache=cache)
        kept = [cache.positions(layer) for layer in (0, 1)]
    for layer, hidden in enumerate(attention_inputs(model, ids)):
        network = stored.layers[layer]
        assert isinstance(network, SinkGate)
        scores = plain(network, hidden)
        assert 0 < float(scores.min()) < float(scores.max()) < 1
        scores[:, [0, 57, 58, 59]] = torch.inf
        best = torch.zeros(scores.numel(), dtype=torch.bool)
        best[scores.flatten().topk(2 * 16).indices] = True
        assert kept[layer] == [torch.nonzero(row).flatten().tolist() for row in best.view_as(scores)]
