"""Fidelity tables: what is measured, which setting is chosen, and what is refused."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import millpond as mp
from millpond.cli.app import app
from millpond.engine.config import EngineConfig
from millpond.engine.engine import Engine
from millpond.engine.request import CacheOptions
from millpond.errors import BudgetError, CacheMismatchError, DataError, OptionError
from millpond.hf.fit import Fit, FitRow, default_path, load_fit, tolerance_rank
from millpond_lab.evals.tasks.text import fidelity
from tests.helpers.evals.small import WORDS, tiny_tokenizer
from tests.helpers.hf.families import build

BUDGETS, CODECS = ["16", "50%", "100%"], ["auto", "int4"]
CONTEXT, CONTINUATION, WINDOWS = 150, 5, 45


@cache
def model(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return build(
        "LlamaConfig",
        "LlamaForCausalLM",
        vocab_size=len(WORDS),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=48,
    )


@pytest.fixture(scope="module")
def novel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("fit") / "novel.txt"
    path.write_text(" ".join(draw.choice(WORDS[2:]) for _ in range(8000)))
    return path


@pytest.fixture(scope="module")
def table(novel: Path) -> Fit:
    return mp.fit(
        model(),
        tiny_tokenizer(),
        novel,
        "h2o",
        budgets=BUDGETS,
        codecs=CODECS,
        context=CONTEXT,
        continuation=CONTINUATION,
        windows=WINDOWS,
        batch=8,
        out=novel.with_suffix(".json"),
        sinks=1,
    )


def made(*rows: tuple[str | None, str, float, float], method: str = "h2o", **more: Any) -> Fit:
    """A table of rows (budget, codec, bytes, KL of every window)."""
    from millpond.hf.calibration.load import model_mark

    found = tuple(FitRow(budget, codec, share, (kl,) * WINDOWS) for budget, codec, share, kl in rows)
    return Fit(model_mark(model()), "Llama", method, more, "", CONTEXT, CONTINUATION, found)


# ------------------------------------------------------------------ measuring


def test_kl_is_that_of_the_predictions_on_each_window(table: Fit, novel: Path) -> None:
    """A window alone, fed token by token without the evaluation's own readers."""
    assert [(row.budget, row.codec) for row in table.rows] == [
        (budget, codec) for budget in ("16", "50%, at least 75", "100%, at least 150") for codec in CODECS
    ]
    windows = fidelity(str(novel), CONTEXT, CONTINUATION, CONTEXT + CONTINUATION)
    samples = list(windows.samples(tiny_tokenizer(), WINDOWS, 0))
    for row in (table.rows[0], table.rows[3]):
        for number in (0, 11, 44):
            ids = [*(samples[number].tokens or ()), *(samples[number].questions[0].tokens or ())]
            logprobs = []
            for settings in (
                {"method": "full"},
                {"method": "h2o", "budget": row.budget, "codec": row.codec, "sinks": 1},
            ):
                with torch.no_grad(), mp.compress(model(), **settings) as kept:
                    steps = [model()(torch.tensor([ids[:CONTEXT]]), cache=kept).logits[0, -1]]
                    steps += [model()(torch.tensor([[i]]), cache=kept).logits[0, -1] for i in ids[CONTEXT:-1]]
                logprobs.append(torch.stack(steps).log_softmax(-1))
            full, other = logprobs
            expected = (full.exp() * (full - other)).sum(-1).mean().item()
            assert row.kl[number] == pytest.approx(expected, rel=1e-3, abs=1e-7)


def test_more_entries_and_bits_cost_more_bytes_and_less_fidelity(table: Fit) -> None:
    few, many = table.rows[0], table.rows[4]
    assert many.bound < 1e-4 < few.bound
    assert few.bytes_share < table.rows[2].bytes_share < many.bytes_share
    assert table.rows[5].bytes_share < many.bytes_share
    assert load_fit(_file(table)) == table


def _file(table: Fit) -> Path:
    path = default_path(model(), "h2o")
    table.save(path)
    return path


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MILLPOND_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("changed", "error", "match"),
    [
        ({"windows": 44}, OptionError, "windows=44 must be 45"),
        ({"context": 1}, OptionError, "context=1"),
        ({"budgets": ["1MB"]}, BudgetError, "bytes depend|what bytes hold"),
        ({"budgets": ["lots"]}, BudgetError, "is not a budget"),
        ({"budgets": []}, OptionError, "at least one budget"),
        ({"codecs": ["int5"]}, OptionError, "unknown codec"),
        ({"codecs": ["kvquant2"]}, OptionError, "calibration"),
        ({"method": "h3o"}, OptionError, "h3o"),
        ({"context": 8000}, DataError, "too short"),
        ({"context": 800}, DataError, "45 are needed"),
        ({"text": "/nowhere.txt"}, DataError, "nowhere"),
    ],
)
def test_what_cannot_be_measured(changed: dict[str, Any], error: type[Exception], match: str, novel: Path) -> None:
    given: dict[str, Any] = {"text": novel, "method": "h2o", **changed}
    with pytest.raises(error, match=match):
        mp.fit(model(), tiny_tokenizer(), **given)


# ------------------------------------------------------------------ choosing


def test_the_bound_is_a_tolerance_limit() -> None:
    """Of n windows the smallest that is above 95 % of all in nine of ten draws of n; fewer than 45 bound nothing."""
    assert FitRow("1", "auto", 1, tuple(range(45))).bound == 44
    assert FitRow("1", "auto", 1, tuple(range(77))).bound == 75
    assert FitRow("1", "auto", 1, tuple(reversed(range(77)))).bound == 75
    assert math.isinf(FitRow("1", "auto", 1, tuple(range(44))).bound)


@pytest.mark.parametrize("n", [45, 76, 77, 80, 200, 100_000])
def test_the_rank_of_the_limit(n: int) -> None:
    """The k-th smallest of n uniform draws has the beta distribution of k and n + 1 - k."""
    stats = pytest.importorskip("scipy.stats")
    k = tolerance_rank(n)
    assert stats.beta.sf(0.95, k, n + 1 - k) >= 0.9
    assert stats.beta.sf(0.95, k - 1, n + 2 - k) < 0.9


def test_a_table_with_few_windows_chooses_nothing() -> None:
    found = made(("16", "auto", 0.1, 0.1))
    few = replace(found, rows=tuple(replace(row, kl=row.kl[:39]) for row in found.rows))
    with pytest.raises(OptionError, match="has 39 windows, and 45 are needed"):
        few.choose(1.0)


def test_the_fewest_bytes_that_keep_the_bound() -> None:
    rows = (
        ("10%", "int4", 0.03, 0.5),
        ("20%", "int4", 0.06, 0.02),
        ("10%", "auto", 0.1, 0.01),
        ("50%", "auto", 0.5, 0.001),
    )
    found = made(*rows)
    chosen = {bound: found.choose(bound) for bound in (1.0, 0.02, 0.015, 0.001)}
    assert [(row.budget, row.codec) for row in chosen.values()] == [row[:2] for row in rows]
    assert found.choose(1.0, "auto").budget == "10%"
    with pytest.raises(
        OptionError, match=r"within|at or below 0.0001 in 95%.*best is budget 50% with codec auto, with 0.001"
    ):
        found.choose(0.0001)
    with pytest.raises(OptionError, match="'int8' is not in this table, which has int4, auto"):
        found.choose(1.0, "int8")


@pytest.mark.parametrize("bad", [0, -1, math.inf, math.nan, "0.1x", True])
def test_bounds_that_are_none(bad: Any) -> None:
    with pytest.raises(OptionError, match="must be a number above 0"):
        mp.compress(model(), "h2o", "auto", max_kl=bad, fit=made(("16", "auto", 0.1, 0.1)))
    with pytest.raises(OptionError, match="must be a number above 0"):
        EngineConfig(method="h2o", max_kl=bad)


def test_compress_takes_budget_and_format_from_the_table(table: Fit) -> None:
    _file(table)
    bound = table.rows[3].bound
    row = table.choose(bound)
    for more in ({}, {"fit": table}, {"fit": str(_file(table))}):
        with mp.compress(model(), "h2o", "auto", max_kl=bound, sinks=1, **more) as kept:
            assert kept.settings is not None
            assert kept.settings["codec"] == row.codec
            assert str(kept.budget).removesuffix(" tokens") == row.budget
    with mp.compress(model(), "h2o", "auto", "int4", max_kl=10, fit=table, sinks=1) as kept:
        assert (str(kept.budget), kept.settings and kept.settings["codec"]) == ("16 tokens", "int4")


def test_a_method_without_a_budget_chooses_a_format() -> None:
    found = made((None, "auto", 1.0, 0.0), (None, "int4", 0.4, 0.01), method="full")
    with mp.compress(model(), "full", "auto", max_kl=0.02, fit=found) as kept:
        assert kept.settings is not None
        assert kept.settings["codec"] == "int4"
    engine = Engine(model(), method="full", budget="auto", max_kl=0.02, fit=found)
    assert (engine.cache.budget, engine.cache.codec) == (None, "int4")
    engine.close()


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({}, OptionError, "needs a bound; give max_kl"),
        ({"max_kl": 1, "sinks": 3}, OptionError, "of h2o with its defaults, not with sinks=3"),
        ({"max_kl": 1, "method": "tova"}, OptionError, "is of method 'h2o', not of 'tova'"),
        ({"max_kl": 1, "budget": "20%"}, OptionError, "max_kl belongs to budget='auto'"),
        ({"budget": "20%"}, OptionError, "fit belongs to budget='auto'"),
        ({"max_kl": 1, "fit": "/nowhere.json"}, DataError, "no table '/nowhere.json'"),
        ({"max_kl": 1, "fit": None}, DataError, "measure one with 'millpond fit"),
    ],
)
def test_what_compress_refuses(given: dict[str, Any], error: type[Exception], match: str) -> None:
    settings: dict[str, Any] = {"method": "h2o", "budget": "auto", "fit": made(("16", "auto", 0.1, 0.1)), **given}
    with pytest.raises(error, match=match):
        mp.compress(model(), **settings)


def test_a_table_of_another_model() -> None:
    found = replace(made(("16", "auto", 0.1, 0.1)), model="0" * 64)
    with pytest.raises(CacheMismatchError, match="another model"):
        mp.compress(model(), "h2o", "auto", max_kl=1, fit=found)
    with pytest.raises(CacheMismatchError, match="another model"):
        Engine(model(), method="h2o", budget="auto", max_kl=1, fit=found)


def test_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "fit.json"
    made(("16", "auto", 0.1, 0.1), ("50%", "int4", 0.2, 0.1)).save(path)
    whole = path.read_text()
    right = json.loads(whole)
    broken = [whole[: len(whole) // 2], "", "[]", "[" * 100_000, "nonsense", whole.replace("0.1", "NaN")]
    broken += [json.dumps({name: value for name, value in right.items() if name != left_out}) for left_out in right]
    broken += [
        json.dumps({**right, "more": 1}),
        json.dumps({**right, "rows": []}),
        json.dumps({**right, "context": "9"}),
    ]
    for name, value in (
        ("budget", "lots"),
        ("budget", 5),
        ("codec", "int5"),
        ("kl", []),
        ("kl", ["x"]),
        ("kl", [1e999]),
    ):
        rows = [{**right["rows"][0], name: value}, right["rows"][1]]
        broken.append(json.dumps({**right, "rows": rows}))
    for text in broken:
        path.write_text(text)
        with pytest.raises(DataError, match=r"not a table|cannot be read"):
            load_fit(path)


# ------------------------------------------------------------------ the engine


def test_a_request_names_its_own_bound() -> None:
    rows = (("16", "int4", 0.03, 0.5), ("50%", "int4", 0.06, 0.02), ("100%", "auto", 1.0, 0.001))
    engine = Engine(model(), method="h2o", budget="auto", max_kl=0.02, fit=made(*rows))
    complete = engine._parts.decode_groups.complete
    assert (engine.cache.budget, engine.cache.codec) == ("50%", "int4")
    assert complete(CacheOptions(max_kl=1)).budget == "16"
    assert complete(CacheOptions(budget="auto", codec="auto", max_kl=0.001)).codec == "auto"
    assert complete(CacheOptions(budget="30%")).budget == "30%"
    with pytest.raises(OptionError, match="max_kl belongs to budget='auto'"):
        complete(CacheOptions(budget="30%", max_kl=0.1))
    with pytest.raises(OptionError, match="the best is budget 100%"):
        complete(CacheOptions(max_kl=1e-9))
    engine.close()


def test_a_request_is_not_told_where_tables_lie() -> None:
    engine = Engine(model(), method="h2o")
    with pytest.raises(OptionError, match="no table of method 'h2o'") as refused:
        engine._parts.decode_groups.complete(CacheOptions(budget="auto", max_kl=0.1))
    assert "/" not in str(refused.value)
    engine.close()


def test_the_command_line(novel: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from tests.helpers.evals.small import save_tiny

    out = tmp_path / "fit.json"
    arguments = [
        "fit",
        "--text",
        str(novel),
        "--model",
        save_tiny(tmp_path / "tiny"),
        "--method",
        "window",
        "--budget",
        "8,50%",
        "--codec",
        "auto",
        "--length",
        "30",
        "--continuation",
        "2",
        "--windows",
        "45",
        "--batch",
        "45",
        "--out",
        str(out),
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "| 50%, at least 15 | auto |" in done.output
    assert [row.budget for row in load_fit(out).rows] == ["8", "50%, at least 15"]
    refused = CliRunner().invoke(app, ["generate", "--prompt", "anna is", "--max-kl", "0.1"])
    assert refused.exit_code == 2
    assert "belongs to budget='auto'" in refused.output
