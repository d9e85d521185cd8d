"""The script that describes pictures: what it draws and counts, a run in small, and verdicts that follow from rows."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import millpond as mp
from millpond.errors import OptionError

ROOT = Path(__file__).parents[3]


def module(folder: str, name: str) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / folder)
        return importlib.import_module(name)


grids, images = (module("benchmarks/quality", name) for name in ("image_grid_model", "image_grids"))
SMALL = ["--steps", "2", "--width", "32", "--grids", "2", "--budgets", "40%"]


def test_pictures_are_drawn_by_a_seed_and_described_cell_by_cell() -> None:
    one, other = grids.held_out(2, 7)
    again, _ = grids.held_out(2, 7)
    assert np.array_equal(one.pixels, again.pixels)
    assert one.cells == again.cells != other.cells
    words = grids.description(one)
    assert len(words) == len(grids.description(other)) == 4 * grids.CELLS
    assert images.named_right(one, words) == 1
    assert images.named_right(one, [*words[:1], "nothing", *words[2:]]) == pytest.approx(8 / 9)
    assert images.named_right(one, words[4:]) == pytest.approx(8 / 9), "each cell counts by its name"
    covered = {shape: grids.shape_mask(shape, 24, (0, 0), 10.0).sum() for shape in grids.SHAPES}
    assert len(set(covered.values())) == len(covered)
    colour = one.pixels[10:14, 10:14].mean((0, 1)) * 255  # the middle of the first cell is covered by every shape
    assert np.abs(colour - grids.COLOURS[one.cells[0][0]]).max() < 12


def test_training_goes_on_where_it_stopped(tmp_path: Path) -> None:
    recipe = grids.Recipe(steps=2, width=32, layers=1, tower_width=32, tower_layers=1, batch=2, checkpoint_steps=1)
    whole, _ = grids.train_model(tmp_path / "whole", recipe)
    _, step = grids.train_model(tmp_path / "parts", recipe, max_minutes=1e-9)
    assert step == 1
    parts, step = grids.train_model(tmp_path / "parts", recipe)
    assert step == 2
    for name, value in whole.state_dict().items():
        assert torch.equal(value, parts.state_dict()[name]), name
    with pytest.raises(OptionError, match="begun with"):
        grids.train_model(tmp_path / "parts", grids.Recipe(width=64))


def test_rows_of_a_small_model(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    images.main(["--checkpoint", str(tmp_path / "model.pt"), "--out", str(out), *SMALL])
    report = json.loads(out.read_text())
    full, *rows = report["rows"]
    assert full["entries"] == 1
    assert [row["method"] for row in rows] == list(images.SETTINGS)
    assert {row["entries"] for row in rows} == {rows[0]["entries"]}, "at one budget all hold as many entries"
    assert rows[0]["entries"] == pytest.approx(0.4, abs=0.01)
    by_name = {row["method"]: row for row in rows}
    assert {(one["better"], one["than"]) for one in report["differences"]} == set(images.PAIRS)
    for one in report["differences"]:
        own, other = (math.log(by_name[one[side]]["perplexity"]["mean"]) for side in ("better", "than"))
        assert one["nats"]["mean"] == pytest.approx(other - own, abs=2e-3)
    assert any(one["nats"]["mean"] for one in report["differences"])


def test_the_whole_budget_is_the_full_cache() -> None:
    """Nothing leaves or is merged at 100 %, so each setting gives what a plain pass over all tokens does."""
    model = grids.build_model(grids.Recipe(width=32, layers=2, tower_width=32, tower_layers=1))
    batch = grids.batch_of(grids.held_out(2, 7), "description")
    with torch.inference_mode():
        ids = torch.cat([batch.prompt, batch.answer], 1)
        logits = model(input_ids=ids, pixel_values=batch.pixels).logits[:, batch.prompt.shape[1] - 1 : -1]
    expected = logits.log_softmax(-1).gather(2, batch.answer[..., None])[..., 0]
    for name in images.SETTINGS:
        with mp.compress(model, codec="auto", budget="100%", **images.setting(name)) as cache:
            told, _ = images.read(model, batch, cache, forced=True)
        torch.testing.assert_close(told, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("nats", "rouge", "expected"),
    [(0.5, 0.1, "reproduced"), (0.5, -0.1, "partly"), (-0.5, -0.1, "contradicted"), (0.0, 0.0, "no difference seen")],
)
def test_verdicts_follow_from_rows(monkeypatch: pytest.MonkeyPatch, nats: float, rouge: float, expected: str) -> None:
    def around(mean: float) -> dict[str, float]:
        return {"mean": mean, "low": mean - 0.01, "high": mean + 0.01}

    claims: Any = module("docs", "generated.claims.images")
    rows = [
        {"method": name, "budget": budget, "perplexity": around(2.0), "rouge": around(0.5), "bytes": 0.4}
        for name, budget in (("full", ""), ("elastic", "40%"), ("h2o", "40%"))
    ]
    pair = {"better": "elastic", "than": "h2o", "budget": "40%", "nats": around(nats), "rouge": around(rouge)}
    other = pair | {"than": "streaming", "nats": around(9.0)}
    data = {"rows": rows, "differences": [pair, other], "model": {"parameters": 10**6}, "grids": 2}
    monkeypatch.setattr(claims, "read", lambda name: data)
    found = claims.beside("h2o")()
    assert found.verdict == expected
    assert "40%: 2.0 and 2.0" in found.figure
