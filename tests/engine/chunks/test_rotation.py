"""Keys of chunks at other positions, for all kinds of RoPE."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import millpond as mp
from millpond.cache.chunks.store import ChunkStore
from millpond.engine.engine import Engine
from millpond.hf.model_profile import ModelProfile
from millpond.hf.signals.rotary import layer_rotations
from tests.helpers.engine.chunked import QUESTION, A, ask, chunked, close
from tests.helpers.engine.helpers import prompt
from tests.helpers.hf.families import family

pytestmark = pytest.mark.filterwarnings("ignore::millpond.hf.layer_budgets.BudgetFloorWarning")


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"rope_type": "default", "rope_theta": 10000.0}),
    "llama3": (
        "llama",
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    ),
    "yarn": (
        "llama",
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 2048},
    ),
    "partial": ("gpt_neox", {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_were_moved_agree_with_keys_computed_there(kind: str) -> None:
    name, parameters = KINDS[kind]
    model = family(name).make(rope_parameters=parameters, max_position_embeddings=16384)
    rotary = layer_rotations(ModelProfile.of(model))[0]
    assert rotary is not None
    torch.manual_seed(0)
    bare = torch.randn(1, 2, 24, 8)
    for begin in (0, 7, 500):
        old = rotary.rotate(bare, torch.arange(begin, begin + 24)[None])
        stored = rotary.rotate(old, torch.arange(begin, begin + 24)[None], inverse=True)
        for moved in (1, 3, 100, 2047, 8000):
            there = torch.arange(begin + moved, begin + moved + 24)[None]
            expected = rotary.rotate(bare, there)
            assert torch.allclose(rotary.rotate(stored, there), expected, atol=1e-4)
            assert not torch.allclose(old, expected, atol=1e-2)


def test_a_prompt_far_behind_is_that_of_the_dense_reference() -> None:
    """The same rotation in the model's own pass: a chunk after a thousand others."""
    model = family("llama").make(max_position_embeddings=16384)
    of = Engine(model, method="full", chunk_store=ChunkStore(None), page_slots=64, max_step_tokens=512)
    far = prompt(200) * 5
    ask(of, chunked(far, mp.Chunk(A), QUESTION), 4)
    again = ask(of, chunked(far, mp.Chunk(A), QUESTION), 4)
    assert again.completions[0].kv.reused_tokens == len(A)
    assert close(again, ask(of, far + A + QUESTION, 4))
    of.close()
