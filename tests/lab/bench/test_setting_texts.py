"""The scripts that judge settings by KL on windows, with a cache and by masks, and FastGen's rules over a text."""

from __future__ import annotations

import doctest
import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from millpond.codec.presets import PRESETS
from millpond.methods import METHODS
from millpond.policy.needs import HeadRule
from millpond.policy.token_classes import TokenClasses

QUALITY = Path(__file__).parents[3] / "benchmarks" / "quality"
#: Ids of special tokens and of punctuation, which no tokenizer names here.
PART = {"special": "0", "punctuation": "1"}


def script(name: str) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(QUALITY)
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        attn_implementation="eager",
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(2, 64, (1, 112), generator=torch.Generator().manual_seed(5))


def test_settings_are_read(tmp_path: Path) -> None:
    texts = script("setting_texts")
    assert doctest.testmod(texts).failed == 0
    row = {"wiki": {"kl": [0.1, 0.2], "bytes": [0.5, 0.5]}}
    assert texts.lacking({"h2o@512": row}, ["h2o@512", "cam@512"], "wiki", 1) == ["cam@512"]
    assert texts.lacking({"h2o@512": row}, ["h2o@512"], "wiki", 2) == ["h2o@512"]
    assert texts.lacking({"h2o@512": row}, ["h2o@512"], "novel", 0) == ["h2o@512"]
    report = {"models": {"m": {"settings": {"h2o@512": row}}, "n": {"none": []}}}
    texts.write(tmp_path / "rows.json", report)
    text = (tmp_path / "rows.json").read_text()
    assert json.loads(text) == report
    assert '"kl": [0.1, 0.2],' in text, "numbers of a row are on one line"


@pytest.mark.parametrize("setting", ["h2o@48", "h2o@80", "fastgen:threshold=0.7:special=0:punctuation=1"])
def test_a_cache_and_a_mask_give_one_divergence(setting: str, model: LlamaForCausalLM, ids: torch.Tensor) -> None:
    texts, masks = script("setting_texts"), script("masked_kl")
    prompt = 96
    (by_cache, share) = texts.judge(model, ids, prompt, [setting], {})[setting]

    class Source:
        def classes(self, given: TokenClasses) -> TokenClasses:
            return TokenClasses(frozenset({0}), frozenset({1}))

    given = texts.parse(setting, {}, prompt)
    ((by_mask, kept),) = masks.judge(model, ids, prompt, [given], Source())
    assert by_mask == pytest.approx(by_cache, rel=1e-3)
    assert by_mask > 1e-3, "something is lost"
    assert kept == pytest.approx(share, abs=0.5 if "fastgen" in setting else 0.17), "bytes are of whole pages"
    if setting == "h2o@48":
        ((other, _),) = masks.judge(model, ids, prompt, [{"method": "h2o", "budget": 40}], Source())
        assert other != pytest.approx(by_cache, rel=1e-2)


def test_equal_bytes_are_whole_pages(model: LlamaForCausalLM, ids: torch.Tensor) -> None:
    texts = script("setting_texts")
    found = texts.judge(model, ids, 96, ["h2o@64", "streaming@=h2o@64", "full/int8"], {})
    assert found["h2o@64"][1] == found["streaming@=h2o@64"][1] == pytest.approx(64 / 96)
    assert found["full/int8"][1] <= 1.0, "of the full cache's bytes in 16 bits, whatever the model computes in"


def test_a_head_that_turns_elsewhere_has_another_rule() -> None:
    rules = script("fastgen_persistence")
    policy = METHODS.get("fastgen")(threshold=0.9, **PART)
    prompt, length = 40, 120
    ids = torch.full((length,), 5)
    weights = torch.zeros(4, length, length)
    weights[:2, :, 0] = 1.0  # a group that looks at the first token alone
    weights[2:, :prompt, 0] = 1.0
    weights[2:, prompt:] = torch.ones(length, length).tril()[prompt:] / torch.arange(1, length + 1)[prompt:, None]
    assert rules.plan(weights, ids, 2, policy).kinds.tolist() == [HeadRule.SPECIAL, HeadRule.FULL]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "LATER", {"all": (2, 0), "new": (80, prompt)})
        few, many = rules.pairs(weights, ids, 2, policy, prompt)
    assert sum(few) == sum(many) == 2
    assert few[0] == 2, "two tokens of forty move no mean of 0.9"
    assert (many[HeadRule.SPECIAL], many[HeadRule.FULL]) == (1, 1)


def test_steps_of_kvquant_hold_what_they_say(
    model: LlamaForCausalLM, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, steps = script("setting_texts"), script("kvquant_ladder")
    each = steps.ladder(3)
    assert [*each] == [f"kvquant3_{step}" for step in steps.STEPS]
    assert replace(each["kvquant3_sink"], name="kvquant3") == PRESETS["kvquant3"]
    for name, codec in each.items():
        monkeypatch.setitem(PRESETS, name, codec)
    monkeypatch.setattr(texts, "CALIBRATION_WINDOWS", 1)
    monkeypatch.setattr(texts, "CALIBRATION_LENGTH", 96)
    known = texts.calibrations(model, ids[0].repeat(3), steps.calibrated(3))
    found = texts.judge(model, ids, 96, [f"full/{name}" for name in each], {}, known=known)
    held = {name.removeprefix("full/kvquant3_"): share for name, (_, share) in found.items()}
    assert held["channel"] == held["pre_rope"]
    assert held["nuq"] < held["outliers"] <= held["sink"]
    assert len({kl for kl, _ in found.values()}) == len(steps.STEPS), "each step changes something"
    assert min(kl for kl, _ in found.values()) > 0
