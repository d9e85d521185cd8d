"""Rows that are computed again, against a dense reference and the attention of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from millpond.cache.chunks.store import ChunkStore
from millpond.cache.chunks.variant import ids_key
from millpond.engine.chunks.prompt import PromptSpan
from millpond.engine.chunks.reuse import ChunkReuse, model_mark
from millpond.engine.engine import Engine
from millpond.engine.request import CacheOptions
from millpond.engine.step_executor import PromptSegment, run
from tests.helpers.engine.chunk_reference import Unrotated, blended
from tests.helpers.engine.chunked import QUESTION, A, B, C
from tests.helpers.hf.families import family, shared_model

pytestmark = pytest.mark.filterwarnings("ignore::millpond.hf.layer_budgets.BudgetFloorWarning")


class Blender:
    """Logits of all computed rows of a prompt, in one pass."""

    def __init__(self) -> None:
        self.model = shared_model("llama")
        self.engine = Engine(self.model, method="full", page_slots=4)
        self.reuse = ChunkReuse(ChunkStore(None), self.engine._model, model_mark(self.model, None))

    def __call__(self, parts: Sequence[tuple[int, ...]], **options: Any) -> tuple[Tensor, Tensor]:
        """(R, vocabulary) and the rows (R,); all parts but the last are chunks."""
        ends = np.cumsum([len(part) for part in parts]).tolist()
        spans = [
            PromptSpan(e - len(p), e, n < len(parts) - 1) for n, (p, e) in enumerate(zip(parts, ends, strict=True))
        ]
        ids = np.array([token for part in parts for token in part])
        blend = self.reuse.begin(ids, spans, CacheOptions(**options), 1, None)
        batch_cache = self.engine._parts.decode_groups.group(CacheOptions()).cache_factory.make_cache(len(ids))
        part = PromptSegment(batch_cache, ids, 0, True, True, blend.span(0, len(ids)))
        with torch.no_grad():
            (logits,) = run(self.engine._model, [], [part])
        blend.finish()
        batch_cache.clear()
        return logits, torch.from_numpy(np.flatnonzero(blend.computed))


@pytest.mark.parametrize("pick", ["random", "attention", "head", "deviation"])
def test_picked_rows_are_those_of_a_dense_reference(pick: str) -> None:
    blender = Blender()
    for part in (A, B, C):
        blender((part, QUESTION))
    logits, rows = blender((C, A, B, QUESTION), recompute=0.4, pick=pick)
    alone = [blended(blender.model, torch.tensor(part), torch.arange(len(part)))[1] for part in (C, A, B, QUESTION)]
    given = [
        Unrotated(torch.cat([one[layer].keys for one in alone], 1), torch.cat([one[layer].values for one in alone], 1))
        for layer in range(2)
    ]
    expected, _ = blended(blender.model, torch.tensor(C + A + B + QUESTION), rows, given)
    assert len(rows) == 0 + 10 + 7 + len(QUESTION)  # the first chunk is exact
    assert torch.allclose(logits, expected, atol=1e-5)
    whole, _ = blended(blender.model, torch.tensor(C + A + B + QUESTION), torch.arange(77))
    assert not torch.allclose(logits, whole[rows], atol=1e-3), "what is reused makes a difference here"
    blender.engine.close()


def test_a_later_token_never_changes_an_earlier_row() -> None:
    blender = Blender()
    for part in (A, B):
        blender((part, QUESTION))
    logits, rows = blender((B, A, QUESTION), recompute=0.5)
    for place in range(len(QUESTION)):
        changed = list(QUESTION)
        changed[place] = (changed[place] + 1) % 96
        other, same = blender((B, A, tuple(changed)), recompute=0.5)
        assert torch.equal(rows, same)
        n = len(rows) - len(QUESTION) + place
        assert torch.allclose(logits[:n], other[:n], atol=1e-6)
        assert not torch.allclose(logits[n], other[n], atol=1e-3)
    blender.engine.close()


def test_attention_to_earlier_parts_is_that_of_the_model() -> None:
    blender = Blender()
    blender((A, B, QUESTION))
    model = family("llama").make(attn_implementation="eager")
    model.load_state_dict(blender.model.state_dict())
    with torch.no_grad():
        found = model(torch.tensor([A + B + QUESTION]), output_attentions=True).attentions
    mean = torch.stack([layer[0].mean(0) for layer in found]).mean(0)
    rows = mean[len(A) : len(A) + len(B)]
    (facts,) = blender.reuse.store.find(ids_key(B))
    (received,) = facts.received
    assert received == pytest.approx(float(rows[:, 1 : len(A)].sum()), rel=1e-4)  # but for the first token
    a = received / (len(A) * len(B))
    b = float(rows[:, len(A) : len(A) + len(B)].sum()) / len(B) ** 2
    assert facts.impact == pytest.approx(1 / (1 + np.exp(-a / b)), rel=1e-4)
    assert torch.allclose(blender.reuse.store.take(facts, 1).scores, rows[:, 1 : len(A)].sum(1), atol=1e-5)
    blender.engine.close()
