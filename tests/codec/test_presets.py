"""The named formats: their true bits, what they refuse, what pairs share."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from millpond.codec import codec_named, list_codecs, resolve
from millpond.codec.presets import PRESETS
from millpond.errors import OptionError


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("kivi2", 3.0),
        ("kivi4", 5.0),
        ("flexgen4", 4.75),
        ("flexgen4_paper", 4.5),
        ("rotated4", 4.5),
        ("int4", 4.375),
        ("int2", 2.375),
        ("int8", 8.375),
        ("mikv", 2.25),
        ("mikv3", 3.25),
        ("mikv4", 4.25),
        ("bf16", 16.0),
    ],
)
def test_true_bits(name: str, bits: float) -> None:
    assert codec_named(name).bits_per_element(128, 128) == bits


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_kvquant_takes_about_a_third_of_a_bit_more(bits: int) -> None:
    found = codec_named(f"kvquant{bits}").bits_per_element(128, 128)
    assert bits + 0.31 < found < bits + 0.47  # 0.32 for outliers; two halves per token of a value


def test_think_saves_a_fifth() -> None:
    codec = codec_named("think")
    kept = codec.layout(80, 128).page_bytes
    assert kept / codec.layout(128, 128).page_bytes == pytest.approx(1 - 0.375 / 2)  # 80 of 128 channels


def test_every_preset_lays_out_a_page_and_whole_groups_fit_it() -> None:
    for name, codec in PRESETS.items():
        layout = codec.layout(128, 128, tables=codec._any_tables())
        assert layout.slots % layout.grain == 0, name
        assert layout.page_bytes % 64 == 0


def test_a_pair_takes_keys_of_one_and_values_of_the_other() -> None:
    pair = codec_named(("bf16", "int4"))
    assert pair.key == codec_named("bf16").key
    assert pair.value == codec_named("int4").value
    assert pair.bits_per_element(128, 128) == (16 + 4.25) / 2


@pytest.mark.parametrize(
    ("name", "match"),
    [("kivi3", "unknown codec 'kivi3'; did you mean 'kivi2'"), (("bf16", "rotated4"), "only one of them is rotated")],
)
def test_what_is_refused(name: str | tuple[str, str], match: str) -> None:
    with pytest.raises(OptionError, match=match.replace("kivi2'", "kivi")):
        codec_named(name)


def test_calibration_is_asked_for() -> None:
    with pytest.raises(OptionError, match="needs a calibration"):
        codec_named("kvquant3").layout(64, 64)


def test_groups_that_do_not_fit_a_model_are_refused_by_name() -> None:
    with pytest.raises(OptionError, match="head_dim=80 does not fall into groups of 32"):
        codec_named("kivi2").layout(80, 80)
    assert codec_named("int4").layout(80, 80).page_bytes > 0


def test_the_list_names_what_a_cache_can_use() -> None:
    names = list_codecs()
    assert names[:4] == ["auto", "f32", "f16", "bf16"]
    assert {"int4", "kivi2", "flexgen4", "fp8", "mikv", "think", "rotated4"} < set(names)
    for name in names[4:]:
        assert resolve(name) == codec_named(name)
    with pytest.raises(OptionError, match=r"unknown codec 'kvi2'; did you mean 'kivi2'\?"):
        resolve("kvi2")


def test_the_table_of_number_formats_has_each_of_them() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "codecs.md").read_text(encoding="utf-8")
    table = page.partition("| codec | bits |")[2].partition("\n\n")[0]
    named = {name for row in table.splitlines()[1:] for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    assert named == set(list_codecs())
