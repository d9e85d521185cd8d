"""TriAttention by hand, against complex numbers over a model's own queries; its file, and files that are none."""

from __future__ import annotations

import cmath
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import millpond as mp
from millpond.errors import CacheMismatchError, OptionError
from millpond.hf.calibration.query_centres import measure_centres
from millpond.methods import METHODS
from millpond.methods.triattention import future_logits
from millpond.policy.scores.query_centres import Bands, QueryCentres
from tests.helpers.matrix.models import llama, prompts

triattention = METHODS.get("triattention")
OFFSETS = [2**power for power in range(17)]
GROUP, HEADS, DIM = 4, 2, 8


def turn(x: Tensor, positions: Tensor) -> Tensor:
    """Two channels as one complex number, turned by w = 1 per position."""
    angle = positions.double()[:, None, :]
    a, b = x[..., 0], x[..., 1]
    return torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


@pytest.mark.parametrize(("distance", "expected"), [(0, 0.0621 + 0.5), (1, -0.7031 + 0.5)])
def test_one_band_by_hand(distance: int, expected: float) -> None:
    """w = 1, E q = 1, E |q| = 1.5, k = 1 before RoPE, distances {1, 2} behind the newest position 7."""
    bands = Bands.of(turn, 2, torch.device("cpu"))
    assert bands.partner.tolist() == [1, 0]
    key = turn(torch.tensor([[[[1.0, 0.0]]]], dtype=torch.float64), torch.tensor([[7 - distance]]))[0]
    mean, magnitude = torch.tensor([[1.0, 0.0]]).double(), torch.tensor([[1.5, 1.5]]).double()
    found = future_logits(mean, magnitude, key, bands, turn, [8, 9])
    # the newest position is t = 7, and cos(t + d - p) = (cos 1 + cos 2) / 2 at p = t
    assert float(found) == pytest.approx(expected, abs=1e-4)


def test_channels_without_rotation_are_bands_of_their_own() -> None:
    bands = Bands.of(None, 4, torch.device("cpu"))
    assert bands.partner.tolist() == [0, 1, 2, 3]
    assert bands.magnitudes(torch.tensor([3.0, -4.0, 0.0, 1.0])).tolist() == [3, 4, 0, 1]


def queries_and_keys(model: Any, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Complex queries (8, n, 4) and keys (2, n, 4) before RoPE of each layer: front and back halves are one number."""
    found: list[Tensor] = []
    hooks = [
        part.register_forward_hook(lambda *a: found.append(a[2][0].detach()))
        for layer in model.model.layers
        for part in (layer.self_attn.q_proj, layer.self_attn.k_proj)
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    halves = [x.view(ids.shape[1], -1, DIM).transpose(0, 1).double() for x in found]
    numbers = [torch.complex(x[..., : DIM // 2], x[..., DIM // 2 :]) for x in halves]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def reference(q_mean: Tensor, q_size: Tensor, k: Tensor, newest: int, free: list[int]) -> list[list[float]]:
    """[KV head][position] by the card's sum over bands, worked with angles, one number at a time."""
    w = [10000 ** (-2 * f / DIM) for f in range(DIM // 2)]
    waves = [  # [distance to the newest][band]: the mean of the rotations to come, as one complex number
        [sum(cmath.exp(1j * w[f] * (back + d)) for d in OFFSETS) / len(OFFSETS) for f in range(DIM // 2)]
        for back in range(newest + 1)
    ]
    scores = []
    for g in range(HEADS):
        best = [-1e9] * k.shape[1]
        for h in range(g * GROUP, g * GROUP + GROUP):
            means, sizes = q_mean[h].tolist(), q_size[h].tolist()
            raw = [
                sum(
                    (means[f] * waves[newest - p][f] * key.conjugate()).real + (sizes[f] - abs(means[f])) * abs(key)
                    for f, key in enumerate(k[g, p].tolist())
                )
                for p in range(k.shape[1])
            ]
            of = [raw[p] for p in free]
            center, spread = statistics.fmean(of), statistics.pstdev(of)
            best = [max(b, (x - center) / spread) for b, x in zip(best, raw, strict=True)]
        scores.append(best)
    return scores


@pytest.mark.parametrize("given", ["file", "text"])
def test_against_angles_of_a_model_s_own_queries(given: str, tmp_path: Path) -> None:
    model, (ids, _) = llama("gqa"), prompts(1)
    n, budget, path = ids.shape[1], 12, tmp_path / "centres.safetensors"
    other = torch.randint(2, 90, (50,), generator=torch.Generator().manual_seed(3))
    options: dict[str, Any] = {"sinks": 2, "recent": 3}
    if given == "file":
        path.write_bytes(measure_centres(model, [other[:30], other[30:]]).content())
        options["centres"] = str(path)
    with torch.no_grad(), mp.compress(model, "triattention", budget, **options) as cache:
        model(ids, cache=cache)
        kept = [cache.positions(layer) for layer in (0, 1)]
    own = queries_and_keys(model, ids)
    parts = [queries_and_keys(model, part[None]) for part in (other[:30], other[30:])]
    for layer in (0, 1):
        if given == "file":
            q = torch.cat([part[layer][0] for part in parts], 1)
            sizes = q.abs().mean(1)
        else:  # the sinks' queries do not count
            q = own[layer][0][:, 2:]
            sizes = q.abs().square().mean(1).sqrt()
        free = list(range(2, n - 3))
        scores = reference(q.mean(1), sizes, own[layer][1], n - 1, free)
        for g in range(HEADS):
            best = sorted(free, key=lambda p: -scores[g][p])[: budget - 5]
            assert kept[layer][g] == sorted([0, 1, *range(n - 3, n), *best])


def test_the_prompt_stays_while_rounds_go_on() -> None:
    model, (ids, _) = llama("gqa"), prompts(1, 40)
    with torch.no_grad(), mp.compress(model, "triattention", 16, every=4) as cache:
        model(ids[:, :9], cache=cache)
        for token in ids[:, 9:].split(1, 1):
            model(token, cache=cache)
        held = [head for layer in (0, 1) for head in cache.positions(layer)]
    assert all(set(range(9)) <= set(head) and len(head) < 20 for head in held)


def centres(shape: tuple[int, ...] = (2, 8, 8)) -> QueryCentres:
    return QueryCentres(torch.zeros(shape), torch.ones(shape))


def changed(**header: Any) -> bytes:
    content = centres().content()
    length = int.from_bytes(content[:8], "little")
    new = json.dumps(json.loads(content[8 : 8 + length]) | header).encode()
    return len(new).to_bytes(8, "little") + new + content[8 + length :]


HUGE = {"dtype": "F32", "shape": [2**30, 2**20, 8], "data_offsets": [0, 512]}
BROKEN = {
    "empty": b"",
    "text": b"no safetensors at all, but some text",
    "torn": centres().content()[:-4],
    "long": (2**40).to_bytes(8, "little") + b"{}",
    "huge": changed(mean=HUGE),
    "foreign": changed(__metadata__={"format": "millpond heads 1"}),
    "types": changed(mean={"dtype": "F16", "shape": [2, 8, 8], "data_offsets": [0, 512]}),
    "flat": centres((16, 8)).content(),
    "nan": QueryCentres(torch.full((2, 8, 8), float("nan")), torch.ones(2, 8, 8)).content(),
    "negative": QueryCentres(torch.zeros(2, 8, 8), -torch.ones(2, 8, 8)).content(),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_file_that_is_none_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(BROKEN[kind])
    with pytest.raises(OptionError, match=r"triattention: centres=.*millpond calibrate --codec triattention"):
        triattention(centres=str(path))


def test_centres_of_another_model_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(centres((1, 8, 8)).content())
    model, (ids, _) = llama("gqa"), prompts(1)
    with (
        torch.no_grad(),
        mp.compress(model, "triattention", 12, centres=str(path)) as cache,
        pytest.raises(CacheMismatchError, match="measure them on this model"),
    ):
        model(ids, cache=cache)
    with pytest.raises(OptionError, match="no text to measure"):
        measure_centres(model, [])
