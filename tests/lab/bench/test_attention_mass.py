"""The scripts that measure a real model's attention: their statistics by hand, and from a model to the page."""

from __future__ import annotations

import importlib.util
import json
import lzma
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

QUALITY = Path(__file__).parents[3] / "benchmarks" / "quality"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("attention_mass", QUALITY / "attention_mass.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def causal(length: int, seed: int = 0) -> torch.Tensor:
    logits = 3 * torch.randn(2, length, length, generator=torch.Generator().manual_seed(seed))
    return logits.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf")).softmax(-1)


def test_rules_keep_equally_much_and_what_they_say(script: ModuleType) -> None:
    before = torch.rand(1, 50, generator=torch.Generator().manual_seed(0))
    kept = {
        name: set(mask[0].nonzero()[:, 0].tolist()) for name, mask in script.choices(before, before.flip(-1)).items()
    }
    assert {len(entries) for entries in kept.values()} == {10}
    assert kept["window"] == {*range(40, 50)}
    assert kept["streaming"] == {0, 1, 2, 3, *range(44, 50)}
    assert kept["heavy only"] == set(before[0].topk(10).indices.tolist())
    assert kept["best"] == {49 - place for place in kept["heavy only"]}
    assert kept["h2o"] == {0, 1, 2, 3, *range(45, 50), 4 + int(before[0, 4:45].argmax())}
    assert kept["h2o, first four out"] == {*range(45, 50), *(before[0, 4:45].topk(5).indices + 4).tolist()}


def test_held_is_the_share_of_the_later_attention(script: ModuleType) -> None:
    weights = causal(164)
    found = script.held(weights)
    window = script.CHOICES.index("window")
    before, after = weights[:, 100:, 80:100].sum((1, 2)), weights[:, 100:, :100].sum((1, 2))
    assert torch.allclose(found["held"][:, window], before / after)
    assert (found["held"] <= found["held"][:, :1] + 1e-6).all()


def test_statistics_of_even_attention(script: ModuleType) -> None:
    length = 128
    weights = torch.ones(2, length, length).tril()
    found = script.layer_statistics(weights / weights.sum(-1, keepdim=True), 2)
    wanted = sum(4 / (i + 1) for i in range(4, length)) / (length - 4)
    assert found["sink"].tolist() == pytest.approx([wanted] * 2)
    assert found["sparsity"].tolist() == [0, 0]
    assert found["own"][0].tolist() == pytest.approx([0.05, 0.2], abs=0.01)
    assert found["ranked_by_age"].numpy() == pytest.approx(1.0, rel=1e-4)


def test_a_power_law_has_its_slope(script: ModuleType) -> None:
    columns = torch.arange(1, 1001).double().pow(-1.5)[None]
    assert float(script.slope(script.at_ranks(columns), 1000)) == pytest.approx(-1.5)
    assert script.spearman(torch.tensor([1.0, 2, 2, 9]), torch.tensor([0.0, 5, 5, 6])) == pytest.approx(1)


@pytest.mark.slow
def test_from_a_text_to_the_page(tmp_path: Path) -> None:
    """On the bundled model, whose own text it is not: the numbers mean nothing."""
    (tmp_path / "text.txt").write_text("k12 v3 k4 v5 . " * 200, encoding="utf-8")
    (tmp_path / "page.md").write_text("before\n<!-- measured -->\nold\n<!-- /measured -->\nafter\n", encoding="utf-8")
    results, picture = tmp_path / "mass.json", tmp_path / "a.svg"
    run(
        QUALITY / "attention_mass.py",
        "--model",
        "pond-recall",
        "--windows",
        "2",
        "--length",
        "128",
        "--out",
        results,
        tmp_path / "text.txt",
    )
    run(QUALITY / "attention_page.py", results, "--page", tmp_path / "page.md", "--svg", picture)
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "old" not in page
    sink = torch.tensor(json.loads(results.read_text())["texts"]["text.txt"]["sink"]).mean()
    assert f"| first four tokens, share of attention | {100 * sink:.1f} % (" in page
    assert "<svg" in picture.read_text(encoding="utf-8")


def run(*words: object) -> None:
    subprocess.run([sys.executable, *map(str, words)], check=True, timeout=300)


def test_the_page_has_the_committed_results(script: ModuleType) -> None:
    root = QUALITY.parents[1]
    found = json.loads(lzma.decompress((root / "benchmarks" / "results" / "attention-mass.json.xz").read_bytes()))
    page = (root / "docs" / "explanation" / "attention-real.md").read_text(encoding="utf-8")
    assert found["choices"] == list(script.CHOICES)
    for text in found["texts"].values():
        for key in ("sink", "sparsity", "sparsity_beyond"):
            assert f"{100 * torch.tensor(text[key]).mean():.1f} %" in page
