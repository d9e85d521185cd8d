"""Calibration of the codec `transform`: its metrics by loops, resumed runs, and what is refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import millpond as mp
from millpond.engine.engine import Engine
from millpond.errors import DataError, OptionError, UnsupportedModelError
from millpond.hf.calibration import attention_moments, transform
from millpond.hf.calibration.attention_moments import (
    LayerMoments,
    LayerPass,
    add_pass,
    metric_of_keys,
    metric_of_values,
)
from millpond.hf.calibration.texts import sampled_texts, windows_of
from millpond.hf.calibration.transform import FewTokensWarning, calibrate_transform
from millpond.hf.model_profile import ModelProfile
from millpond.hf.signals.rotary import layer_rotations
from millpond.kernels.args import AttentionShape
from tests.helpers.hf.transform import KINDS, ids, tiny, transform_of_tiny

HEADS, KV_HEADS, DIM, N = 4, 2, 8, 120
#: The token that is exact, of 116 behind the sinks.
ATTENDED = 20


def a_pass(kind: str, softcap: float = 0.0) -> LayerPass:
    generator = torch.Generator().manual_seed(0)
    rotary = layer_rotations(ModelProfile.of(tiny(kind)))[0]
    q, k, v = (torch.randn(h, N, DIM, generator=generator) for h in (HEADS, KV_HEADS, KV_HEADS))
    q, k[:, ATTENDED] = q + 1.5, 2.0  # what most queries attend to
    shape = AttentionShape(DIM**-0.5 * 2, softcap)
    return LayerPass(q, k, v, shape, rotary, torch.randn(HEADS, DIM, 16, generator=generator))


def by_differences(layer: LayerPass, step: float = 1e-4) -> tuple[torch.Tensor, torch.Tensor]:
    """Metrics from the derivative of the layer's output by its keys before RoPE and its values, entry by entry.

    Only squares of one entry's error are summed: errors of different entries are independent. An exact one has none.
    """
    at = [i for i in range(7, N, 8) if i >= 68]
    positions = torch.arange(N)[None]
    keys, values = layer.k.double()[None], layer.v.double()[None]
    if layer.rotary is not None:
        keys = layer.rotary.rotate(keys, positions, inverse=True)
    q, maps = layer.q.double()[:, at], layer.maps.double()

    def outputs(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        k = keys if layer.rotary is None else layer.rotary.rotate(keys, positions)
        k, v = (t[0].repeat_interleave(HEADS // KV_HEADS, 0) for t in (k, values))
        logits = q @ k.transpose(1, 2) * layer.shape.scale
        if layer.shape.softcap:
            logits = layer.shape.softcap * torch.tanh(logits / layer.shape.softcap)
        logits = logits.masked_fill(torch.arange(N) > torch.tensor(at)[:, None], -torch.inf)
        return torch.einsum("hiv,hvo->hio", logits.softmax(-1) @ v, maps)

    base, found = outputs(keys, values), []
    for side in (0, 1):
        metric = torch.zeros(KV_HEADS * DIM, KV_HEADS * DIM, dtype=torch.float64)
        for t in set(range(4, N - 64)) - {ATTENDED}:
            slopes = []
            for head in range(KV_HEADS):
                for channel in range(DIM):
                    moved = [keys.clone(), values.clone()]
                    moved[side][0, head, t, channel] += step
                    slopes.append((outputs(moved[0], moved[1]) - base) / step)
            jacobian = torch.stack(slopes)  # (d, Hq, queries, hidden)
            jacobian = jacobian[:, :, [n for n, i in enumerate(at) if t <= i - 64]]
            if side == 1:
                flat = jacobian.sum(1).flatten(1)  # values: terms between heads are kept
                metric += flat @ flat.T
            else:
                flat = jacobian.flatten(1)
                metric += flat @ flat.T
        found.append(metric / len(at))
    return found[0], found[1]


@pytest.mark.parametrize(("kind", "softcap"), [("gqa", 0.0), ("yarn", 0.0), ("partial", 0.0), ("gqa", 3.0)])
def test_metrics_are_what_outputs_feel(kind: str, softcap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_moments, "DRAWN", 3000)  # of the entries that 4 stand for
    layer = a_pass(kind, softcap)
    moments = LayerMoments.empty(HEADS, KV_HEADS, DIM, DIM)
    add_pass(moments, layer, torch.Generator().manual_seed(0), 100)
    moments.residuals = torch.tensor([2.0]).double()
    keys, values = by_differences(layer)
    torch.testing.assert_close(metric_of_values(moments, layer.maps, KV_HEADS), values / 2, rtol=1e-3, atol=1e-4)
    found = metric_of_keys(moments)
    assert float((found - keys / 2).norm() / (keys / 2).norm()) < 0.05


def test_moments_are_of_keys_before_rope_and_leave_out_exact_tokens() -> None:
    layer = a_pass("gqa")
    moments = LayerMoments.empty(HEADS, KV_HEADS, DIM, DIM)
    add_pass(moments, layer, torch.Generator(), 7)
    assert layer.rotary is not None
    keys = layer.rotary.rotate(layer.k[None], torch.arange(N)[None], inverse=True)[0]
    expected = torch.cat([t.transpose(0, 1).flatten(1) for t in (keys, layer.v)], 1)
    assert int(moments.tokens) == N - 4 - 1  # sinks, and 1 % of 116 tokens: by unit and of the whole text the same one
    distances = torch.cdist(moments.samples, expected)
    assert float(distances.min(1).values.max()) < 0.02
    assert int(distances.argmin(1).min()) >= 4
    assert ATTENDED not in distances.argmin(1)
    assert len(moments.samples) == 7
    assert len(moments.attention) == N - 4


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_many_kinds(kind: str) -> None:
    found = transform_of_tiny(kind)
    config = tiny(kind).config
    dim = 32 if kind == "wide" else 8
    assert found.model.shapes == ((config.num_key_value_heads, dim, dim),) * 2
    assert found.calibrated.tokens == 2048
    assert bool((found.thresholds > 0).all())
    largest = [int((keys.mean.abs() > 40).sum()) for keys, _ in found.layers]
    assert largest == ([2, 2] if kind == "biases" else [0, 0])  # biases are in the mean, not in the covariance


def test_an_interrupted_calibration_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transform, "SAVE_SECONDS", 0.0)
    texts, file = [ids(512, seed) for seed in range(1, 5)], tmp_path / "sums"

    def stop(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate_transform(tiny("gqa"), texts, length=512, resume=file, progress=stop)
    assert file.exists()
    steps: list[int] = []
    found = calibrate_transform(
        tiny("gqa"), texts, length=512, resume=file, progress=lambda done, total: steps.append(done)
    )
    assert steps[0] == 3
    assert found.digest() == transform_of_tiny("gqa").digest()
    assert not file.exists()


@pytest.mark.parametrize("content", [b"", b"no sums", None])
def test_sums_of_others_are_replaced(content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transform, "SAVE_SECONDS", 0.0)
    file = tmp_path / "sums"
    if content is None:

        def stop(done: int, total: int) -> None:
            if done == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            calibrate_transform(tiny("gqa"), [ids(512, 9)] * 4, length=512, resume=file, progress=stop)
    else:
        file.write_bytes(content)
    steps: list[int] = []
    texts = [ids(512, seed) for seed in range(1, 5)]
    calibrate_transform(tiny("gqa"), texts, length=512, resume=file, progress=lambda done, total: steps.append(done))
    assert steps[0] == 0


def test_too_little_text() -> None:
    with pytest.raises(DataError, match=r"128 tokens.*16 numbers a token.*at least 128 tokens|no text has"):
        calibrate_transform(tiny("gqa"), [ids(127)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibrate_transform(tiny("gqa"), [ids(512, seed) for seed in (1, 2)], length=512)
    with pytest.warns(FewTokensWarning, match="512 tokens, and 1,024 are better"):
        calibrate_transform(tiny("gqa"), [ids(512)], length=512)
    wide = mp.load_model("pond-recall")
    with pytest.raises(DataError, match="at least"):
        calibrate_transform(wide, [ids(200)])


def test_what_cannot_be_calibrated() -> None:
    with pytest.raises(OptionError, match="at least 128 tokens"):
        calibrate_transform(tiny("gqa"), [ids(512)], length=100)
    with pytest.raises(OptionError, match="bits a number"):
        calibrate_transform(tiny("gqa"), [ids(512)], most_bits=9)
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "v_head_dim": 8, "q_lora_rank": None}
    latent = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "first_k_dense_replace": 1}
    config: Any = DeepseekV2Config(**sizes, **heads, **latent)
    with pytest.raises(UnsupportedModelError, match="latents"):
        calibrate_transform(DeepseekV2ForCausalLM(config), [ids(512)])


def test_sampled_texts_are_the_same_again() -> None:
    model, tokenizer = mp.load_model("pond-recall"), mp.load_tokenizer("pond-recall")
    torch.manual_seed(1)
    before = torch.rand(1)
    torch.manual_seed(1)
    one = sampled_texts(model, tokenizer, 12)
    assert torch.equal(before, torch.rand(1))  # the caller's numbers go on
    assert len(one) == 24
    assert all(len(text) == 12 for text in one)
    assert torch.equal(torch.stack(one), torch.stack(sampled_texts(model, tokenizer, 12)))
    assert len({tuple(text.tolist()) for text in one}) > 8


def test_windows_are_spread_over_a_text() -> None:
    assert [int(window[0]) for window in windows_of(torch.arange(1000), 4, 100)] == [0, 300, 600, 900]
    assert [len(window) for window in windows_of(torch.arange(30), 4, 100)] == [30]


def test_parts_of_single_heads_are_those_of_the_head_alone() -> None:
    """One KV head is the whole layer; of two, each has its own mean, and z that its tokens alone give."""
    whole = transform_of_tiny("mqa")
    for layer, (head,) in zip(whole.layers, whole.heads, strict=True):
        for one, other in zip(layer, head, strict=True):
            assert torch.equal(one.rows, other.rows)
            assert torch.equal(one.columns, other.columns)
    two = transform_of_tiny("gqa")
    for layer, heads in zip(two.layers, two.heads, strict=True):
        for side, parts in zip(layer, zip(*heads, strict=True), strict=True):
            assert torch.equal(side.mean, torch.cat([part.mean for part in parts]))
            assert [part.rows.shape[1] for part in parts] == [len(side.mean) // 2] * 2
            for part in parts:  # the columns undo the rows
                torch.testing.assert_close(part.rows @ part.columns.T, torch.eye(part.n_rows), atol=0.1, rtol=0)


def test_a_model_has_no_hooks_afterwards() -> None:
    """Hooks of transformers would keep an engine from running the model without its modules."""
    model = tiny.__wrapped__("gqa")
    seen: list[str] = []
    own = model.model.layers[0].register_forward_hook(lambda *_: seen.append("own"))
    for _ in range(2):
        calibrate_transform(model, [ids(512), ids(512, 1)], length=512)
        assert [len(module._forward_hooks) for module in model.modules() if module._forward_hooks] == [1]
    assert seen
    own.remove()
    Engine(model, method="full", deterministic=True).close()


def test_a_file_may_do_without_parts_for_single_heads() -> None:
    found = calibrate_transform(tiny("gqa"), [ids(512), ids(512, 1)], length=512, most_head_bits=0)
    assert (found.heads, found.calibrated.most_head_bits) == ((), 0)
    with pytest.raises(OptionError, match="no parts for single heads"):
        found.check_head_bits(1.5)
    with pytest.raises(OptionError, match="transform:9"):
        calibrate_transform(tiny("gqa"), [ids(512)], most_head_bits=9)
