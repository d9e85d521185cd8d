"""SnapKV by hand: window scores, pools, the window that stays, a planted needle."""

import pytest
import torch

from millpond.errors import OptionError
from millpond.methods import METHODS
from millpond.policy.scores.attention import WindowAttention
from millpond.policy.view import View
from tests.helpers.papers.fixture import LOGITS, ROWS, N, feed, kept, make_layer_cache, run

snapkv = METHODS.get("snapkv")
MEAN = [0.151342, 0.271993, 0.100061, 0.249521]  # of the last two rows


def window_view() -> View:
    signal = torch.tensor([[sum(row[j] if j < len(row) else 0.0 for row in ROWS[-2:]) for j in range(N)]])
    return View(torch.arange(N, dtype=torch.int32)[None], signal, seen=N, layer=0)


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        ("none", MEAN),
        ("max", [0.271993, 0.271993, 0.271993, 0.249521]),
        ("avg", [0.141112, 0.174465, 0.207192, 0.116527]),  # the zero padding is counted
    ],
)
def test_pooled_scores(pool: str, expected: list[float]) -> None:
    score = WindowAttention(window=2, kernel=3, pool=pool)  # type: ignore[arg-type]
    assert torch.allclose(score.score(window_view(), 0)[0, :4], torch.tensor(expected), atol=1e-6)


def test_keeps_the_best_and_the_window() -> None:
    assert run(snapkv(window=2, kernel=3, pool="none"), budget=4) == [1, 3, 4, 5]


def test_no_compression_of_a_prompt_within_the_budget() -> None:
    assert run(snapkv(window=2, kernel=3), budget=6) == [0, 1, 2, 3, 4, 5]


def test_grows_while_decoding_as_the_paper_does() -> None:
    cache = make_layer_cache(snapkv(window=2, kernel=1), budget=3)
    feed(cache, LOGITS[None], 0, 4)
    for t in (4, 5):
        feed(cache, LOGITS[None], t, t + 1)
    assert len(kept(cache)) == 5


def test_evict_keeps_the_budget_while_decoding() -> None:
    cache = make_layer_cache(snapkv(window=2, kernel=1, decode="evict"), budget=3)
    feed(cache, LOGITS[None], 0, 4)
    for t in (4, 5):
        feed(cache, LOGITS[None], t, t + 1)
        assert len(kept(cache)) == 3


def test_planted_needle_is_kept() -> None:
    """A key that the window's queries look at survives at any budget that holds the window and one pool."""
    torch.manual_seed(0)
    n, w, kernel = 64, 8, 5
    logits = torch.randn(2, n, n, dtype=torch.float64)
    logits[:, -w:, 20] = 20.0
    cache = make_layer_cache(snapkv(window=w, kernel=kernel), budget=w + kernel)
    feed(cache, logits, 0, n)
    for head in range(2):
        assert 20 in kept(cache, head)
        assert set(range(n - w, n)) <= set(kept(cache, head))


def test_even_kernel_is_refused() -> None:
    with pytest.raises(OptionError, match="kernel=4 must be odd"):
        snapkv(kernel=4)
