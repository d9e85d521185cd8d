"""The presets: what they stand for works, in Python and on the command line."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

import millpond as mp
from cli.test_cli import FILLER, right, wrong
from millpond.budget import DEFAULT
from millpond.cli.options import CacheChoice
from millpond.errors import OptionError
from millpond.models.load import load_model
from millpond.presets import PRESETS
from tests.helpers.hf.families import one, run


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load_model("pond-recall", "bf16")


@pytest.mark.parametrize(("name", "least", "most"), [("light", 0.5, 0.9), ("balanced", 0.2, 0.5), ("tiny", 0.2, 0.45)])
def test_each_holds_as_little_as_it_says(model: PreTrainedModel, name: str, least: float, most: float) -> None:
    with mp.compress(model, **mp.preset(name)) as cache:  # type: ignore[arg-type]
        run(model, one(600), 4, cache=cache)
        stats = cache.stats()
    assert least < stats.kv_bytes / stats.full_kv_bytes < most


def test_a_preset_is_a_copy() -> None:
    mp.preset("tiny")["budget"] = "90%"
    assert mp.preset("tiny")["budget"] == str(DEFAULT)
    assert sorted(PRESETS) == ["balanced", "light", "tiny"]
    with pytest.raises(OptionError, match="unknown preset 'tinny'; did you mean 'tiny'"):
        mp.preset("tinny")


def test_on_the_command_line() -> None:
    asked = ["generate", "--prompt", FILLER, "--max-new-tokens", "2"]
    spelled = ["--method", "ada", "--codec", "rotated4"]
    short, long = right(*asked, "--preset", "tiny"), right(*asked, *spelled)
    assert short.stdout == long.stdout
    held = [result.stderr.split(" tokens")[0] for result in (short, long)]
    assert held[0] == held[1]
    assert "--preset tiny decides the method too; leave out --method" in wrong(*asked, "--preset", "tiny", *spelled)
    assert "unknown preset 'small'" in wrong(*asked, "--preset", "small")
    assert "unknown preset 'small'" in wrong("serve", "--preset", "small")


def test_the_command_line_leaves_the_format_to_the_model() -> None:
    """A preset comes to a model by its name, so that one with large key biases gets a format that suits it."""
    choice = CacheChoice(preset="balanced", given=frozenset({"preset"}))
    assert choice.for_request() == {"preset": "balanced"}
    passed = choice.for_compress()
    assert passed["preset"] == "balanced"
    assert not {"method", "budget", "codec"} & set(passed)
