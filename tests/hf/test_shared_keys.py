"""Layers that share keys read their owner's entries: equal to stock, and to a mask over all entries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import millpond as mp
from millpond.cache.layer.shared_entries import SharedEntries
from millpond.codec.rotate import rotate
from millpond.hf.calibration.measure import calibrate
from millpond.hf.model_profile import ModelProfile
from millpond_lab.bench.model_types.greedy import LENGTHS, Wrong, compare, generated, masked_run, prompts
from millpond_lab.bench.model_types.tiny_model import tiny_model
from tests.helpers.hf.tiny_types import STEPS, WITHIN, ids_of, model_of, stock_of, write

TYPES = ["gemma3n_text", "gemma4_text", pytest.param("gemma4_unified_text", marks=pytest.mark.slow)]
pytestmark = pytest.mark.filterwarnings("ignore::millpond.hf.layer_budgets.FewEntriesWarning")


@pytest.mark.parametrize("kind", TYPES)
@torch.no_grad()
def test_everything_kept_is_stock(kind: str) -> None:
    """Entries of two of four layers are held, with the bytes that transformers' own cache has."""
    model = model_of(kind)
    with mp.compress(model, "full") as held:
        run = generated(model, held, new=STEPS)
        compare(run, stock_of(kind), kind, WITHIN)
        stats = held.stats()
        assert stats.entry_layers == [0, 1]
        assert stats.shared_layers == {2: 0, 3: 1}
        assert len(stats.stored) == 2
        tokens = sum(length + STEPS - 1 for length in LENGTHS)
        wide = [layer.table.pool.arrays.key_dim * layer.table.n_kv_heads for layer in held.layer_caches if layer.table]
        assert stats.full_kv_bytes == tokens * sum(wide) * 2 * 4
        with pytest.raises(mp.CacheMismatchError, match=r"layer 3: .* 0 to 3, of which 0, 1 hold entries"):
            held.positions(3)


@pytest.mark.covering
@pytest.mark.parametrize("method", ["h2o", "snapkv", "window", "tova"])
@pytest.mark.parametrize("kind", TYPES)
@torch.no_grad()
def test_half_of_the_entries_are_a_mask_over_all(kind: str, method: str) -> None:
    """What a pass shows its owner it shows those that share: the same mask for both."""
    options = {"snapkv": {"window": 4}}.get(method, {})
    with mp.compress(model_of(kind), method, 0.5, **options) as held:
        run = generated(model_of(kind), held, new=STEPS)
        held.check_integrity()
        assert held.stats().evicted > 0
    compare(run, masked_run(model_of(kind), run), f"{kind}, {method}", WITHIN)
    shown = masked_run(model_of(kind), run, hide=False)
    assert (shown.logits - run.logits).abs().max() > 100 * WITHIN  # what was evicted matters


@torch.no_grad()
def test_the_comparison_sees_what_those_that_share_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above sees one entry that is another for those that share."""

    def changed(self: SharedEntries, table: Any, k: Tensor, v: Tensor, span: Any) -> None:
        original(self, table, k, v, span)
        for n, found in enumerate(self._parts[-1].met):
            self._parts[-1].met[n] = found._replace(values=found.values.clone().index_fill_(1, torch.tensor([0]), 0.0))

    original = SharedEntries.collect
    monkeypatch.setattr(SharedEntries, "collect", changed)
    model = model_of("gemma3n_text")
    with mp.compress(model, "h2o", 0.5) as held:
        run = generated(model, held, new=8)
    with pytest.raises(Wrong, match="logits differ"):
        compare(run, masked_run(model, run), "changed", WITHIN)


@pytest.mark.parametrize("codec", ["int8", "int4", "rotated4"])
@torch.no_grad()
def test_those_that_share_read_what_the_codes_say(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a decoding step, the numbers that the owner has stored, and the new token's; `rotated4` stores them turned."""
    config = model_of("gemma3n_text").config.to_dict() | {"head_dim": 64}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
    ids, met = ids_of(300), []

    def note(self: SharedEntries, q: Tensor, shape: Any) -> Tensor:
        met.append((self._parts[0].met[0], self._parts[0].basis))
        return original(self, q, shape)

    original = SharedEntries.attend
    with mp.compress(model, "full", codec=codec) as held:
        model(ids[:, :-1], cache=held)
        stored = held.layer_caches[1].read(0)
        assert held.stats().bits_per_element < 14
        monkeypatch.setattr(SharedEntries, "attend", note)
        model(ids[:, -1:], cache=held)
    found, basis = met[1]
    assert (basis is not None) == (codec == "rotated4")
    order = found.positions[0].argsort()[found.positions.shape[1] - 300 :]
    assert found.positions[0, order].tolist() == list(range(300))
    for ours, theirs in ((found.keys, stored.keys), (found.values, stored.values)):
        read = (ours if basis is None else rotate(ours))[:, order[:-1]]
        assert (read - theirs[:, :299]).abs().max() < 1e-5


@pytest.mark.parametrize("kind", TYPES)
@torch.no_grad()
def test_beams_turns_and_forks_go_on_from_the_owners(kind: str) -> None:
    model = model_of(kind)
    ids, mask = prompts()
    settings = {"attention_mask": mask, "num_beams": 3, "new": 12}
    with mp.compress(model, "full") as held:
        assert torch.equal(write(model, ids, cache=held, **settings), write(model, ids, **settings))
        held.reset()
        first = write(model, ids, attention_mask=mask, cache=held)
        both = torch.cat([first, ids_of(5, 4, 2)], 1)
        longer = torch.cat([mask, torch.ones(2, both.shape[1] - mask.shape[1], dtype=mask.dtype)], 1)
        with held.fork() as other:
            found = write(model, both, attention_mask=longer, cache=other)
        again = write(model, both, attention_mask=longer, cache=held)
    assert torch.equal(found, again)
    assert torch.equal(found, write(model, both, attention_mask=longer))


@pytest.mark.parametrize("kind", TYPES)
@torch.no_grad()
def test_a_prompt_in_chunks_is_one_prompt(kind: str) -> None:
    model, ids = model_of(kind), ids_of(40)
    whole = model(ids, cache=DynamicCache(config=model.config)).logits
    with mp.compress(model, "full") as held:
        parts = [model(ids[:, n : n + 7], cache=held).logits for n in range(0, 40, 7)]
    assert (torch.cat(parts, 1) - whole).abs().max() < WITHIN * whole.abs().max()


@pytest.mark.covering
@pytest.mark.parametrize("method", ["full", "h2o"])
@pytest.mark.parametrize("kind", TYPES)
@torch.no_grad()
def test_drafts_that_are_taken_back_leave_nothing(kind: str, method: str) -> None:
    """Prompt-lookup generation, whose passes come in parts: what is certain, then each token of a draft."""
    model = model_of(kind)
    ids = torch.cat([ids_of(12)] * 3, 1)
    budget = None if method == "full" else 20
    with mp.compress(model, method, budget) as held:
        drafted = write(model, ids, 16, cache=held, prompt_lookup_num_tokens=3)
    with mp.compress(model, method, budget) as held:
        assert torch.equal(drafted, write(model, ids, 16, cache=held))


@pytest.mark.parametrize("kind", TYPES)
@torch.no_grad()
def test_a_document_holds_the_owners_entries(kind: str, tmp_path: Path) -> None:
    model, ids, path = model_of(kind), ids_of(30), tmp_path / "text.safetensors"
    both = torch.cat([ids, ids_of(4, 5)], 1)
    with mp.compress(model, "h2o", 16) as held:
        model(ids, cache=held)
        mp.save_document(held, ids, path)
        expected = write(model, both, cache=held)
    restored, _ = mp.restore_document(model, path)
    with restored:
        assert torch.equal(write(model, both, cache=restored), expected)


@pytest.mark.parametrize(
    ("method", "options", "why"),
    [
        ("streaming", {}, r"moves the positions of keys, .* use positions=\"absolute\""),
        ("kvzip", {"ask": "none"}, r"repeats the prompt over one layer's keys"),
        ("infllm", {}, r"chooses for the queries of each layer alone; use a method that evicts"),
    ],
)
def test_methods_that_change_more_than_entries_are_refused(method: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(mp.UnsupportedModelError, match=rf"lets layers 2, 3 read the keys of others, and .* {why}"):
        mp.compress(model_of("gemma3n_text"), method, 512, **options)


def test_a_calibration_is_refused() -> None:
    with pytest.raises(mp.UnsupportedModelError, match=r"layers that read the keys of others, .* without calibration"):
        calibrate(model_of("gemma3n_text"), ids_of(400)[0])


def test_who_reads_whom_is_read_off_the_configuration() -> None:
    assert ModelProfile.of(model_of("gemma4_text")).shared == {2: 0, 3: 1}
    assert ModelProfile.of(tiny_model("gemma3_text")).shared == {}
    assert ModelProfile.of(model_of("gemma3n_text")).attending == (0, 1)


@torch.no_grad()
def test_nothing_is_held_between_passes() -> None:
    """What those that share read is of one pass, and goes with it."""
    model = model_of("gemma3n_text")
    with mp.compress(model, "full") as held:
        write(model, ids_of(20), cache=held)
        assert all(
            layer_cache.shared is not None and not layer_cache.shared._parts for layer_cache in held.layer_caches
        )


@torch.no_grad()
def test_the_model_runs_on_its_own_cache_while_switched() -> None:
    model, ids = model_of("gemma4_text"), ids_of(20)
    wanted = write(model, ids)
    with mp.compress(model, "h2o", 16) as held:
        write(model, ids, cache=held)
        assert torch.equal(write(model, ids, cache=DynamicCache(config=model.config)), wanted)
