"""kvpress's names: each is mapped or refused with what to do, and what they stand for works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import millpond as mp
from millpond.errors import OptionError
from millpond.methods import METHODS
from millpond.models.cache_argument import cache_argument
from millpond.presses import EQUIVALENTS, OTHERS
from tests.helpers.matrix.models import llama

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "from-kvpress.md"
SINGLE = [name for name, own in EQUIVALENTS.items() if not own.wraps]
AROUND = [
    f"{name}({inner})"
    for name, own in EQUIVALENTS.items()
    if own.wraps
    for inner in ("SnapKVPress", "TOVAPress" if name == "CriticalKVPress" else "ExpectedAttentionPress")
]


@pytest.mark.parametrize("name", [*SINGLE, *AROUND])
def test_what_a_press_stands_for_can_be_built(name: str) -> None:
    settings = mp.press(name, compression_ratio=0.7)
    method = METHODS.get(settings.pop("method"))
    assert settings.pop("budget") == 0.3
    policy = method(**settings)
    assert policy.takes_budget
    if "decode" in method.options and "once" in method.options["decode"].choices:
        assert settings["decode"] == "once"


@pytest.mark.parametrize(
    "name", ["SnapKVPress", "StreamingLLMPress", "AdaKVPress(KnormPress)", "CriticalKVPress(TOVAPress)"]
)
def test_a_ratio_is_the_share_that_leaves_and_what_is_decoded_stays(name: str) -> None:
    model, ids = llama("gqa"), torch.arange(4, 84)[None]
    options: dict[str, Any] = {"window_size": 8} if name == "SnapKVPress" else {}
    with torch.inference_mode(), mp.compress(model, **mp.press(name, 0.75, **options)) as cache:
        model(ids, **cache_argument(cache))
        kept = [sum(map(len, cache.positions(layer))) for layer in cache.entry_layers]
        assert kept == [20 * model.config.num_key_value_heads] * len(kept)
        if name in SINGLE:
            for token in range(5):
                model(torch.tensor([[token + 4]]), **cache_argument(cache))
            assert [len(cache.positions(layer)[0]) for layer in cache.entry_layers] == [25] * len(kept)


def test_options_of_a_press_have_its_own_names() -> None:
    assert mp.press("SnapKVPress", 0.5, window_size=16)["window"] == 16
    assert mp.press("ChunkKVPress(SnapKVPress)", 0.5, chunk_length=7)["chunk"] == 7
    for name, own in EQUIVALENTS.items():
        assert {*own.renamed.values()} <= {*METHODS.get(own.method).options}, name


def test_nothing_leaves_at_zero() -> None:
    assert mp.press("SnapKVPress", compression_ratio=0) == {"method": "full"}


@pytest.mark.parametrize(
    ("name", "ratio", "options", "message"),
    [
        ("SnapPress", 0.5, {}, "unknown press 'SnapPress'; did you mean 'SnapKVPress'"),
        ("SnapKVPress", 0.5, {"window": 3}, "unknown option of SnapKVPress 'window'; did you mean 'window_size'"),
        ("SnapKVPress", 1.0, {}, "compression_ratio=1.0 must be a number from 0 to below 1"),
        ("SnapKVPress", "half", {}, "compression_ratio='half' must be"),
        ("AdaKVPress", 0.5, {}, r"needs a press to wrap; write AdaKVPress\(SnapKVPress\)"),
        ("SnapKVPress(AdaKVPress)", 0.5, {}, "SnapKVPress wraps no press; write SnapKVPress alone"),
        ("AdaKVPress(ChunkKVPress)", 0.5, {}, "around another itself"),
        ("AdaKVPress(ThinKPress)", 0.5, {}, "ThinKPress has no equivalent.*codec='int4'"),
        ("snap kv", 0.5, {}, "'snap kv' is no press"),
    ],
)
def test_what_is_no_press_is_refused_with_what_is_nearest(
    name: str, ratio: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        mp.press(name, ratio, **options)


def test_methods_in_the_advice_exist() -> None:
    for name, advice in OTHERS.items():
        for method in re.findall(r"method='(\w+)'", advice):
            assert method in METHODS.names(), name


def test_the_page_names_every_press() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name, own in EQUIVALENTS.items():
        assert re.search(rf"^\| `{name}[`(].*`{own.method}", text, re.MULTILINE), name
    assert [name for name in OTHERS if f"| `{name}` |" not in text] == []
