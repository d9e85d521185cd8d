"""Training of KVzap's networks: labels against the model's own attention, fits by hand, and a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import millpond as mp
from millpond.policy.trained.file import hidden_networks_of
from millpond_lab.train.kvzap.fit import Explained, fit_gelu, fit_linear
from millpond_lab.train.kvzap.labels import RepeatReader, shapes_of
from millpond_lab.train.kvzap.train import KVzapSettings, Network, train_kvzap
from millpond_lab.train.retain.texts import Asked
from tests.helpers.hf.eager import eager_attention_and_values
from tests.helpers.hf.normed import attention_inputs
from tests.helpers.matrix.models import llama

ASK = [5, 6]


def text(n: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 96, (n,), generator=torch.Generator().manual_seed(seed))


def test_labels_are_those_of_the_paper() -> None:
    """Equation 3, entry by entry, of the eager attention of transformers: s+ = max A |v W_O| / |h|."""
    model, ids = llama("gqa", torch.float32), text(20)
    whole = torch.cat([ids, torch.tensor(ASK), ids])[None]
    attention, values = eager_attention_and_values(model, whole)
    inputs = attention_inputs(model, whole)
    found = RepeatReader(model, ASK).read(ids)
    dim = model.config.head_dim
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    for layer, sample in enumerate(found):
        assert torch.allclose(sample.hidden, inputs[layer][:20], atol=1e-5)
        out = model.model.layers[layer].self_attn.o_proj.weight.detach()
        for head in range(model.config.num_key_value_heads):
            for j in range(20):
                v = values[layer][j, head * dim : (head + 1) * dim]
                shares = [
                    float(attention[layer][0, h, i, j])
                    * float((out[:, h * dim : (h + 1) * dim] @ v).norm())
                    / float(inputs[layer][i].norm())
                    for h in range(head * group, (head + 1) * group)
                    for i in range(22, 42)
                ]
                assert float(sample.labels[j, head].exp()) == pytest.approx(max(shares), rel=1e-3)


def test_ridge_and_r2() -> None:
    draw = torch.Generator().manual_seed(0)
    x, w, b = torch.randn(4000, 6, generator=draw), torch.randn(2, 6, generator=draw), torch.tensor([3.0, -1.0])
    noise = torch.randn(4000, 2, generator=draw)
    y = x @ w.T + b + noise
    network = fit_linear(x, y)
    assert torch.allclose(network.w, w, atol=0.08)
    assert torch.allclose(network.b, b, atol=0.08)
    explained = Explained()
    for part in (slice(0, 1000), slice(1000, 4000)):
        explained.add(network, x[part], y[part])
    lengths = w.square().sum(1)
    assert explained.r2() == pytest.approx((lengths / (lengths + 1)).tolist(), abs=0.03)


def test_gelu_learns_what_a_line_cannot() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 4, generator=draw)
    y = torch.stack([x[:, 0].abs() - 5, 100 * x[:, 1].abs()], 1)
    found = []
    for network in (fit_linear(x, y), fit_gelu(x, y, 16, 300, 0)):
        explained = Explained()
        explained.add(network, x, y)
        found.append(min(explained.r2()))
    assert found[0] < 0.1
    assert found[1] > 0.9


class Drawn:
    """Random texts."""

    name = "random tokens"

    def draw(self, stream_name: str, seed: int, step: int) -> Asked:
        return Asked(text(40, seed=1000 * len(stream_name) + step), 30)


@pytest.mark.parametrize("network", ["linear", "mlp"])
def test_a_run_writes_networks_that_act(network: Network, tmp_path: Path) -> None:
    model, out = llama("gqa", torch.float32), tmp_path / "networks.safetensors"
    settings = KVzapSettings(network=network, texts=20, tokens=40, check_texts=2, epochs=60)
    result = train_kvzap(model, ASK, Drawn(), out, settings)
    again = train_kvzap(model, ASK, Drawn(), tmp_path / "again.safetensors", settings)
    assert out.read_bytes() == (tmp_path / "again.safetensors").read_bytes()
    assert again.r2 == result.r2
    assert max(map(max, result.r2)) > 0.05
    read = hidden_networks_of(out.read_bytes(), "here")
    assert dict(read.facts)["network"] == network
    with (
        torch.no_grad(),
        mp.compress(model, "kvzap", networks=str(out), threshold=result.quantiles[1], window=4) as cache,
    ):
        model(text(40, 9)[None], cache=cache)
        kept = sum(len(head) for layer in (0, 1) for head in cache.positions(layer))
    assert 0.2 * 4 * 40 < kept < 0.9 * 4 * 40


def test_shapes() -> None:
    assert shapes_of(llama("gqa", torch.float32)) == [(32, 2), (32, 2)]
