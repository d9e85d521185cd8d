"""KVQuant end to end: calibrated on a text, keys stored before RoPE, in every kind of model that has entries."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

import millpond as mp
from millpond.cache.pages import rope_tables
from millpond.codec.calibration import Calibration, load_calibration
from millpond.engine.engine import Engine
from millpond.engine.request import Request
from millpond.errors import CacheMismatchError, DataError, OptionError, UnsupportedModelError
from millpond.hf.calibration.load import rotations_before_rope
from millpond.hf.calibration.measure import _read, calibrate
from millpond.hf.document import read_document, restore_document, save_document
from millpond.hf.model_profile import ModelProfile
from tests.helpers.engine.helpers import finish, greedy
from tests.helpers.hf.families import VOCABULARY, build, family, left_padded, run, teacher_forced, text

#: Models of every kind of rotation: halves, interleaved, partial, with norms, by layer, scaled, none.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 16}),
    "llama 80": ("llama", {"head_dim": 80}),
    "yarn": (
        "llama",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gpt_neox": ("gpt_neox", {"hidden_size": 64}),
    "phi": ("phi", {"hidden_size": 128, "partial_rotary_factor": 0.5}),
    "cohere": ("cohere", {"hidden_size": 64}),
    "gemma3": ("gemma3", {"head_dim": 16}),
    "gpt2": ("gpt2", {"hidden_size": 64}),
}
LENGTH, STEPS = 120, 40


@cache
def model(name: str) -> PreTrainedModel:
    base, options = MODELS[name]
    return family(base).make(**options)


@cache
def calibrated(name: str) -> Calibration:
    return calibrate(model(name), text(1, 600, seed=8)[0], windows=2, length=200, fisher=name == "llama")


def compressed(name: str, codec: str = "kvquant4", method: str = "full", **more: Any) -> mp.MillpondCache:
    return mp.compress(model(name), method, codec=codec, calibration=calibrated(name), **more)


def read(name: str, **settings: Any) -> tuple[list[Any], Tensor]:
    """What each layer holds of the second row of a prompt, and the logits of a step behind it."""
    prompt = left_padded([LENGTH, LENGTH - 25])
    with torch.no_grad(), mp.compress(model(name), "full", **settings) as cache:
        logits = teacher_forced(model(name), prompt, text(2, 1, seed=4), cache)[:, -1]
        cache.check_integrity()
        if settings["codec"] != "bf16":
            assert any(layer_cache.table.quantized.lens.all() for layer_cache in cache.layer_caches)
        return [layer_cache.read(1) for layer_cache in cache.layer_caches], logits


@pytest.mark.parametrize(
    "name",
    [name if number % 3 == 0 else pytest.param(name, marks=pytest.mark.slow) for number, name in enumerate(MODELS)],
)
def test_every_kind_of_rotation(name: str) -> None:
    """The first entries bit by bit, the others as near as four bits bring them; a step attends to what is read."""
    exact, expected = read(name, codec="bf16")
    found, logits = read(name, codec="kvquant4", calibration=calibrated(name))
    for ours, full in zip(found, exact, strict=True):
        assert torch.equal(ours.positions, full.positions)
        if full.positions[0, 0] == 0:
            assert torch.equal(ours.keys[:, 0], full.keys[:, 0].float())
        old = full.positions[0] < LENGTH - 25
        for a, b in ((ours.keys, full.keys), (ours.values, full.values)):
            assert 0 < float((a[:, old] - b[:, old]).norm() / b[:, old].norm()) < 0.12 or full.positions[0, 0] > 0
    assert float((logits - expected).norm() / expected.norm()) < 0.25


def test_more_bits_are_nearer() -> None:
    exact = read("llama", codec="bf16")[1]
    errors = [
        float((read("llama", codec=codec, calibration=calibrated("llama"))[1] - exact).norm())
        for codec in ("kvquant4", "kvquant3", "kvquant2")
    ]
    assert errors == sorted(errors)


def test_ranges_are_those_of_the_keys_before_rope() -> None:
    """Of the key projection itself: its 0.5 % and 99.5 % quantiles, channel by channel."""
    made, ids, seen = model("llama"), text(1, 256, seed=2), []
    hook = made.model.layers[1].self_attn.k_proj.register_forward_hook(lambda m, i, out: seen.append(out[0, 1:]))
    with torch.no_grad():
        made(ids)
    hook.remove()
    found = calibrate(made, ids[0], windows=1, length=256, bits=(4,)).layers[1]
    low, high = seen[0].bfloat16().double().quantile(torch.tensor([0.005, 0.995]).double(), 0)
    torch.testing.assert_close(found.key_zero.flatten(), ((low + high) / 2).float(), rtol=0.02, atol=0.02)
    torch.testing.assert_close(found.key_scale.flatten(), ((high - low) / 2).float(), rtol=0.02, atol=0.02)


def test_sensitivities_are_squared_gradients() -> None:
    """Of the loss by a key before RoPE: the slope that small steps of the key projection show."""
    made = family("llama").make(head_dim=16).double()
    ids = text(1, 24, seed=3)

    def loss(step: float) -> float:
        def add(module: Any, args: Any, out: Tensor) -> Tensor:
            return out + step * torch.zeros_like(out).index_put(
                (torch.tensor(0), torch.tensor(9), torch.tensor(21)), one
            )

        one = torch.ones((), dtype=torch.float64)
        hook = made.model.layers[0].self_attn.k_proj.register_forward_hook(add)
        with torch.no_grad():
            logits = made(ids).logits[0]
        hook.remove()
        return float(F.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum"))

    slope = (loss(1e-2) - loss(-1e-2)) / 2e-2
    found = _read(made, ids, rotations_before_rope(ModelProfile.of(made)), 0, True)[0][2]
    assert found is not None
    assert float(found[1, 9, 5]) == pytest.approx(slope**2, rel=0.01)  # head 1, channel 5 of 16
    assert slope != 0


def test_a_file_holds_all_of_it(tmp_path: Path) -> None:
    ids, path = text(1, LENGTH), tmp_path / "a.safetensors"
    q_norm = calibrate(model("llama"), text(1, 600)[0], windows=2, length=200, bits=(2, 3), normalise=(2,))
    q_norm.save(path)
    rows = []
    for given in (q_norm, path, load_calibration(path)):
        with torch.no_grad(), mp.compress(model("llama"), "full", codec="kvquant2", calibration=given) as cache:
            model("llama")(ids, cache=cache)
            rows.append(cache.layer_caches[1].read(0).keys)
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])
    assert q_norm.layers[0].keys[2].cuts
    assert not q_norm.layers[0].keys[3].cuts


def test_tables_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = text(1, LENGTH)
    rows = []
    for first in (1024, 32):
        monkeypatch.setattr(rope_tables, "INITIAL_POSITIONS", first)
        with torch.no_grad(), compressed("llama") as cache:
            rows.append(torch.stack([model("llama")(ids[:, i : i + 1], cache=cache).logits for i in range(LENGTH)]))
    torch.testing.assert_close(rows[0], rows[1])


def test_it_goes_with_methods_that_evict_and_with_later_turns() -> None:
    prompt, more = left_padded([LENGTH, 90]), text(2, 40, seed=6)
    made = model("llama")
    with torch.no_grad(), compressed("llama", "kvquant4", "h2o", budget=70, sinks=1) as cache:
        ids = run(made, prompt, STEPS, cache=cache).ids
        mask = F.pad(prompt["attention_mask"], (0, STEPS + 40), value=1)
        turn = {"input_ids": torch.cat([ids, more], 1), "attention_mask": mask}
        run(made, turn, STEPS, cache=cache)
        cache.check_integrity()
        assert max(n for layer in cache.stats().stored for s in layer for n in s) <= 70


def test_the_engine_answers_as_generate() -> None:
    ids = text(1, LENGTH)
    with torch.no_grad(), compressed("llama") as cache:
        expected = run(model("llama"), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 20, cache=cache)
    engine = Engine(model("llama"), method="full", codec="kvquant4", calibration=calibrated("llama"))
    engine.add(Request(request_id="a", prompt=tuple(ids[0].tolist()), params=greedy(20)))
    found = finish(engine)["a"]
    assert list(found.completions[0].token_ids) == expected.ids[0, LENGTH:].tolist()


def test_a_document_is_restored_with_its_calibration(tmp_path: Path) -> None:
    made, ids, path = model("llama"), text(1, LENGTH), tmp_path / "c.safetensors"
    calibrated("llama").save(path)
    with torch.no_grad(), mp.compress(made, "full", codec="kvquant3", calibration=path) as cache:
        read_document(made, cache, ids)
        save_document(cache, ids, tmp_path / "text")
        expected = made(text(1, 4, seed=1), cache=cache).logits
    cache, _ = restore_document(made, tmp_path / "text")
    with cache, torch.no_grad():
        torch.testing.assert_close(made(text(1, 4, seed=1), cache=cache).logits, expected)


# ---------------------------------------------------------------------------------- what is refused


def test_a_codec_that_needs_one_asks_for_it() -> None:
    with pytest.raises(OptionError, match="'kvquant3' needs a calibration of this model"):
        mp.compress(model("llama"), codec="kvquant3")
    with pytest.raises(OptionError, match="only kvquant2, kvquant3 and kvquant4 take one"):
        mp.compress(model("llama"), codec="int4", calibration=calibrated("llama"))


def test_another_model_is_told_by_its_weights_but_not_by_its_dtype() -> None:
    other = build(
        "LlamaConfig",
        "LlamaForCausalLM",
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=48,
    )
    with pytest.raises(CacheMismatchError, match="made for another model"):
        mp.compress(other, codec="kvquant4", calibration=calibrated("llama"))
    same = family("llama").make(head_dim=16).bfloat16()
    mp.compress(same, codec="kvquant4", calibration=calibrated("llama")).close()


def test_files_that_are_no_calibration(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        load_calibration(tmp_path / "none.safetensors")
    (tmp_path / "torn").write_bytes(b"\x00" * 20)
    with pytest.raises(DataError, match="cannot be read"):
        load_calibration(tmp_path / "torn")
    from safetensors.torch import load_file, save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "other")
    with pytest.raises(DataError, match="is no calibration of this Millpond"):
        load_calibration(tmp_path / "other")
    calibrated("llama").save(tmp_path / "good")
    about = {
        "format": "millpond calibration 1",
        "model": "x",
        "name": "x",
        "layers": "2",
        "bits": "[4]",
        "outliers": "0.01",
        "sinks": "1",
    }
    tensors = load_file(tmp_path / "good")
    save_file({name: t for name, t in tensors.items() if name != "1.key_scale"}, tmp_path / "lacks", about)
    save_file(tensors | {"0.key_table.4": torch.zeros(15)}, tmp_path / "short", about)
    for name in ("lacks", "short"):
        with pytest.raises(DataError, match="is broken"):
            load_calibration(tmp_path / name)


def test_what_cannot_be_calibrated() -> None:
    ids = text(1, 300)[0]
    with pytest.raises(DataError, match="has 40 tokens"):
        calibrate(model("llama"), ids[:40])
    with pytest.raises(OptionError, match="bits=5: tables"):
        calibrate(model("llama"), ids, bits=(5,))
    with pytest.raises(OptionError, match=r"outliers=0\.5"):
        calibrate(model("llama"), ids, outliers=0.5)
    with pytest.raises(OptionError, match="head_dim=8: codes need a multiple of 16"):
        calibrate(family("llama").make(head_dim=8), ids, windows=1, length=64)
    with pytest.raises(UnsupportedModelError, match="latents"):
        calibrate(family("deepseek_v3").make(), ids)
    turning = family("llama").make(
        head_dim=16, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    )
    with pytest.raises(UnsupportedModelError, match="cannot be stored before RoPE; use codec='kivi4'"):
        calibrate(turning, ids)


def test_bits_that_were_not_calibrated() -> None:
    three = calibrate(model("llama"), text(1, 300)[0], windows=1, length=256, bits=(3,), fisher=False)
    with pytest.raises(OptionError, match="needs tables of 4 bits, and this calibration has those of 3"):
        mp.compress(model("llama"), codec="kvquant4", calibration=three)
    mp.compress(model("llama"), "full", codec="kvquant3", calibration=three).close()
