"""Pages that sequences begin with together are attended to once, and nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import millpond as mp
from millpond.cache.attention.paged import PagedAttention
from millpond.cache.pages import shared_prefix
from millpond.cache.pages.shared_prefix import SharedPrefixRuns, SharedRun
from millpond.kernels import ops
from millpond.kernels.pages import PageArrays
from tests.engine import test_codecs
from tests.helpers.matrix.models import llama


def runs_of(rows: list[list[int]], full: list[int], worth: int = 1) -> list[SharedRun]:
    ids = np.array([[row, [100 + page for page in row]] for row in rows], dtype=np.int32)
    arrays = PageArrays(256, 8, 4, 4, torch.float32, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_prefix, "MIN_SHARED_ENTRIES", worth)
        found = SharedPrefixRuns.of(ids, np.array(full, dtype=np.int32), arrays)
    return [] if found is None else found.runs


def test_what_all_share_then_what_some_share() -> None:
    rows = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7], [8, 9, 10, 11]]
    assert runs_of(rows, [4, 4, 4, 4]) == [SharedRun((0, 1, 2), 0, 2), SharedRun((0, 1), 2, 3)]


def test_only_full_pages_are_shared() -> None:
    assert runs_of([[1, 2, 3], [1, 2, 3]], [3, 2]) == [SharedRun((0, 1), 0, 2)]
    assert runs_of([[1, 2], [1, 2]], [0, 2]) == []


def test_small_runs_are_not_worth_a_call() -> None:
    rows = [[1, 2], [1, 2], [1, 3]]
    assert runs_of(rows, [2, 2, 2], worth=16) == [SharedRun((0, 1, 2), 0, 1)]
    assert runs_of(rows, [2, 2, 2], worth=17) == []


@pytest.mark.parametrize("method", [{"method": "full"}, {"method": "snapkv", "budget": 40}])
def test_a_batch_of_one_prompt_decodes_as_alone(method: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "MIN_SHARED_ENTRIES", 1)
    calls = []
    real = ops.decode_shared
    monkeypatch.setattr(ops, "decode_shared", lambda args: calls.append(1) or real(args))
    model = llama(heads="gqa")
    gen = torch.Generator().manual_seed(3)
    prompt, later = torch.randint(5, 60, (1, 50), generator=gen), torch.randint(5, 60, (3, 12), generator=gen)
    with torch.no_grad(), mp.compress(model, **method, page_slots=8) as cache:
        model(prompt, cache=cache)
        cache.batch_repeat_interleave(3)
        together = [model(later[:, i : i + 1], cache=cache).logits for i in range(12)]
        cache.check_integrity()
    assert len(calls) == 12 * model.config.num_hidden_layers
    for s in range(3):
        with torch.no_grad(), mp.compress(model, **method, page_slots=8) as cache:
            model(prompt, cache=cache)
            for i, found in enumerate(together):
                alone = model(later[s : s + 1, i : i + 1], cache=cache).logits
                torch.testing.assert_close(found[s : s + 1], alone, rtol=1e-4, atol=1e-5)


def test_methods_that_write_scores_have_pages_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "MIN_SHARED_ENTRIES", 1)
    monkeypatch.setattr(ops, "decode_shared", lambda *_, **__: pytest.fail("a score goes into every slot"))
    model = llama(heads="gqa")
    with torch.no_grad(), mp.compress(model, "h2o", 20, page_slots=8) as cache:
        model(torch.randint(5, 60, (1, 50)), cache=cache)
        cache.batch_repeat_interleave(3)
        model(torch.randint(5, 60, (3, 1)), cache=cache)


@pytest.mark.parametrize("codec", ["int4", "fp8", "kivi2"])
@pytest.mark.parametrize("device", ["cpu", "other"])
@pytest.mark.parametrize(("kernels", "atol"), [("reference", 1e-5), ("auto", 1e-3)])
def test_codes_that_a_batch_begins_with_are_read_once(
    codec: str, device: str, kernels: str, atol: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same numbers in both ways in which a run of codes is read: by the kernel of a step, and decoded.

    The kernels of the CPU round queries to whole numbers, page by page.
    """
    monkeypatch.setenv("MILLPOND_KERNELS", kernels)
    if device == "other":
        monkeypatch.setattr(shared_prefix, "FOLDED_DEVICES", ())
    model = test_codecs.model()
    gen = torch.Generator().manual_seed(3)
    prompt, later = torch.randint(5, 60, (1, 330), generator=gen), torch.randint(5, 60, (3, 6), generator=gen)
    phases: list[int] = []
    real = PagedAttention._two_phases
    monkeypatch.setattr(PagedAttention, "_two_phases", lambda *args: phases.append(1) or real(*args))
    logits, counts = [], []
    for worth in (64, 10**9):
        monkeypatch.setattr(shared_prefix, "MIN_SHARED_CODES", worth)
        with torch.no_grad(), mp.compress(model, method="full", codec=codec) as cache:
            model(prompt, cache=cache)
            cache.batch_repeat_interleave(3)
            logits.append(torch.stack([model(later[:, i : i + 1], cache=cache).logits for i in range(6)]))
            counts.append(len(phases))
            cache.check_integrity()
    assert counts == [6 * model.config.num_hidden_layers] * 2
    torch.testing.assert_close(logits[0], logits[1], atol=atol, rtol=0)
