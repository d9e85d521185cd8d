"""Attention-Gate through the checks of the matrix, and everywhere that a sequence can go: what it has read follows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import millpond as mp
from millpond.cache.entries import read_write
from millpond.engine.engine import Engine
from millpond.engine.request import Request
from millpond.errors import CacheMismatchError, OptionError
from millpond.hf import retaining_heads
from millpond.hf.document import read_document, restore_document, save_document
from millpond.policy.trained.file import save_heads
from millpond_lab.bench.methods.candidate import random_gates
from tests.helpers.engine.helpers import add, finish, greedy, prompt, tokens
from tests.helpers.hf.families import left_padded, shared_model
from tests.helpers.matrix.checks import CHECKS
from tests.helpers.matrix.models import llama, prompts
from tests.helpers.random_heads import GATES_OF_PACKAGE
from tests.matrix import test_invariance as matrix

METHOD = "attention_gate"
GATED: dict[str, Any] = {"sinks": 1, "window": 2, "every": 3, "chunk": 8}
#: Every token is flagged, so that the budget decides alone and the total is exact.
CAPPED: dict[str, Any] = {"sinks": 1, "window": 2, "every": 1, "threshold": 0.0}
EXACT = ["ratio", "sizes", pytest.param("second turn", marks=pytest.mark.slow), "everything"]
LOOSE = ["batch", "reset", "bytes", "pages", "chunks", "turn of one"]
FAMILIES = ["mistral", "qwen3", "opt", "gpt_neox"]
pytestmark = pytest.mark.filterwarnings("ignore::millpond.hf.layer_budgets.FewEntriesWarning")


@pytest.mark.parametrize("check", LOOSE)
def test_matrix_without_a_budget(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matrix.METHODS, METHOD, GATED)
    monkeypatch.setattr(matrix, "budget_of", lambda method, budget=None: {})
    CHECKS[check](METHOD)


def test_a_prompt_that_is_read_in_full_gives_the_first_token_of_the_full_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matrix.METHODS, METHOD, {**GATED, "acts": "end"})
    matrix.test_first_token_is_exact(METHOD)


@pytest.mark.parametrize("check", EXACT)
def test_matrix_of_the_cap(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matrix.METHODS, METHOD, CAPPED)
    if check == "sizes":  # the highest of both heads together stay
        monkeypatch.setitem(matrix.METHODS, "ada", CAPPED)
        monkeypatch.setattr(mp, "compress", as_method(mp.compress))
        CHECKS[check]("ada")
    else:
        CHECKS[check](METHOD)


def as_method(compress: Callable[..., Any]) -> Callable[..., Any]:
    """`compress` with the gate in place of any method."""
    return lambda model, method, **more: compress(model, METHOD, **more)


@pytest.mark.parametrize("decode", ["evict", "grow"])
def test_a_gate_that_keeps_all_is_full_bit_by_bit(decode: str) -> None:
    model, (ids, mask) = llama(dtype=torch.float32), prompts(2)
    found = []
    for method, options in (("full", {}), (METHOD, {"threshold": 0.0, "decode": decode, "every": 2})):
        with torch.no_grad(), mp.compress(model, method, native_layers=False, **options) as cache:
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=8,
                do_sample=False,
                cache=cache,
                output_logits=True,
                return_dict_in_generate=True,
            )
            found.append((torch.stack(out.logits), cache.positions(1, 1)))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def run(model: Any, batch: dict[str, Tensor], steps: int = 8, **more: Any) -> tuple[list[list[int]], list[Any]]:
    with torch.no_grad(), mp.compress(model, METHOD, **GATED) as cache:
        out = model.generate(**batch, max_new_tokens=steps, do_sample=False, cache=cache, **more)
        kept = [cache.positions(len(cache.layers) - 1, s) for s in range(len(out))]
        cache.check_integrity()
    return out[:, batch["input_ids"].shape[1] :].tolist(), kept


@pytest.mark.parametrize("family", FAMILIES)
def test_families_batch_and_alone(family: str) -> None:
    model, batch = shared_model(family), left_padded([40, 31])
    together, kept = run(model, batch)
    assert any(len(head) < 40 for sequence in kept for head in sequence)
    for s in (0, 1):
        own = batch["input_ids"][s, batch["attention_mask"][s].bool()][None]
        alone = run(model, {"input_ids": own, "attention_mask": torch.ones_like(own)})
        assert alone == ([together[s]], [kept[s]])


def test_drafts_that_are_taken_back_change_nothing() -> None:
    model, (ids, mask) = llama(), prompts(1)
    batch = {"input_ids": ids, "attention_mask": mask}
    assert run(model, batch, 12, prompt_lookup_num_tokens=3) == run(model, batch, 12)


def test_what_was_read_follows_a_choice_of_sequences() -> None:
    """After beams were reordered each sequence goes on as if it had been alone."""
    model, first, later = llama(), prompts(2, length=30)[0][:, 14:], prompts(2, length=80, seed=6)[0][:, 7:]
    with torch.no_grad(), mp.compress(model, METHOD, **GATED) as cache:
        model(first, cache=cache)
        cache.reorder_cache(torch.tensor([1, 1, 0]))
        model(later[[0, 1, 0]], cache=cache)
        found = [cache.positions(1, s) for s in range(3)]
    for s, (begin, end) in enumerate(((1, 0), (1, 1), (0, 0))):
        with torch.no_grad(), mp.compress(model, METHOD, **GATED) as cache:
            model(first[begin : begin + 1], cache=cache)
            model(later[end : end + 1], cache=cache)
            assert cache.positions(1) == found[s]


def test_a_document_goes_on_with_what_was_read(tmp_path: Path) -> None:
    model = llama(dtype=torch.float32)
    ids, more = prompts(1, length=90)[0], prompts(1, length=80, seed=7)[0]
    with torch.no_grad(), mp.compress(model, METHOD, "60%", **GATED) as cache:
        read_document(model, cache, ids)
        save_document(cache, ids, tmp_path / "text")
        context = cache.layer_caches[0].sequence_state.contexts[0]
        model(more, cache=cache)
        expected = cache.positions(1)
    cache, _ = restore_document(model, tmp_path / "text")
    with torch.no_grad(), cache:
        restored = cache.layer_caches[0].sequence_state
        assert torch.equal(restored.contexts[0].keys, context.keys)
        assert torch.equal(restored.contexts[0].values, context.values)
        model(more, cache=cache)
        assert cache.positions(1) == expected


def test_a_fork_goes_on_alone() -> None:
    model, ids = llama(), prompts(1, length=50)[0]
    ends = [prompts(1, length=70, seed=seed)[0] for seed in (3, 4)]
    with torch.no_grad(), mp.compress(model, METHOD, **GATED) as cache:
        model(ids, cache=cache)
        with cache.fork() as other:
            for end, own in zip(ends, (cache, other), strict=True):
                model(end, cache=own)
            forked = [own.positions(1) for own in (cache, other)]
    for end, found in zip(ends, forked, strict=True):
        with torch.no_grad(), mp.compress(model, METHOD, **GATED) as cache:
            model(ids, cache=cache)
            model(end, cache=cache)
            assert cache.positions(1) == found


def test_bytes_of_what_was_read_are_counted() -> None:
    model, ids = llama(), prompts(1, length=50)[0]
    with torch.no_grad(), mp.compress(model, METHOD, **GATED) as cache:
        assert cache.stats().gate_bytes == 0
        model(ids, cache=cache)
        assert cache.stats().gate_bytes == 2 * 50 * 2 * 8 * 2  # layers, tokens, key and value, width, bytes
        cache.reset()
        assert cache.stats().gate_bytes == 0


def test_side_cache_of_known_shapes() -> None:
    """At most 15 % of the full cache of pond-recall in 16 bits, and 3 % of that of an 8B model."""
    from millpond.policy.trained.networks import default_shape

    for hidden, kv_width, share in ((192, 2 * 32, 0.15), (4096, 8 * 128, 0.03)):
        _, width = default_shape(hidden)
        assert 2 * width * 2 <= share * (2 * kv_width * 2)


# ---------------------------------------------------------------------- the engine


@pytest.mark.parametrize("runner", ["lean", pytest.param("modules", marks=pytest.mark.slow)])
@pytest.mark.parametrize("decode", ["evict", "grow"])
def test_the_engine_gives_the_tokens_of_generate(decode: str, runner: str) -> None:
    """Prompts beside each other, cut wherever the scheduler cuts them, with pages of others in the tree."""
    options = {**GATED, "decode": decode} | ({} if decode == "evict" else {"every": 16})
    model = shared_model("llama")
    engine = Engine(
        model, method=METHOD, options=options, max_step_tokens=21, page_slots=4, prefix_cache=True, runner=runner
    )
    for length in (90, 60, 17):
        add(engine, Request(request_id=str(length), prompt=prompt(length), params=greedy(9, ignore_eos=True)))
    done = finish(engine)
    engine.check_integrity()
    engine.close()
    for length in (90, 60, 17):
        ids = torch.tensor([prompt(length)])
        with torch.no_grad(), mp.compress(model, METHOD, **options) as cache:
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=9,
                do_sample=False,
                cache=cache,
                eos_token_id=None,
            )
        assert tokens(done[str(length)]) == out[0, length:].tolist(), length


@pytest.mark.parametrize("runs", ["generate", "engine"])
def test_no_more_is_held_than_is_kept_with_a_window_and_a_chunk(runs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt of 160 tokens, which a gate that acts at its end holds whole."""
    seen: list[int] = []
    join = read_write.join

    def watched(*args: Any, **kwargs: Any) -> Any:
        found = join(*args, **kwargs)
        seen.append(int((found.positions >= 0).sum(1).max()))
        return found

    monkeypatch.setattr(read_write, "join", watched)
    model, options = shared_model("llama"), {**GATED, "chunk": 16, "threshold": 0.8}
    with torch.no_grad(), mp.compress(model, METHOD, **options) as cache:
        model(torch.tensor([prompt(160)]), cache=cache)
        kept = max(max(h) for layer in cache.stats().stored for h in layer)
    assert kept + 2 + 16 < 120
    if runs == "engine":
        seen.clear()
        engine = Engine(model, method=METHOD, options=options, max_step_tokens=21, page_slots=4)
        add(engine, Request(request_id="long", prompt=prompt(160), params=greedy(2, ignore_eos=True)))
        finish(engine)
        engine.close()
    assert len(seen) >= 2 * 10
    assert max(seen) <= kept + 2 + 16


# ---------------------------------------------------------------------- errors


def test_files_of_other_kinds_and_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from millpond_lab.bench.methods.candidate import random_heads

    model, other = llama(), llama("mha")
    gate, heads = tmp_path / "gate.safetensors", tmp_path / "heads.safetensors"
    save_heads(random_gates(model), gate)
    save_heads(random_heads(model), heads)
    with mp.compress(model, METHOD, gate=str(gate), attach=False) as cache:
        cache._used = True
        assert cache.policy.gates is not None
    with pytest.raises(OptionError, match=r"of the kind 'retain', and this method takes 'gate'.*millpond train gate"):
        mp.compress(model, METHOD, gate=str(heads))
    with pytest.raises(OptionError, match=r"of the kind 'gate', and this method takes 'retain'"):
        mp.compress(model, "locret", heads=str(gate))
    with pytest.raises(CacheMismatchError, match=r"these gates were trained for another model .*'millpond train gate'"):
        mp.compress(other, METHOD, gate=str(gate))
    with pytest.raises(OptionError, match="cannot be read"):
        mp.compress(model, METHOD, gate="nowhere.safetensors")
    monkeypatch.setattr(retaining_heads, "gates_of_package", GATES_OF_PACKAGE)
    with pytest.raises(OptionError, match=r"millpond train gate --model MODEL .*--target-keep 10% --out gate"):
        mp.compress(other, METHOD)


@pytest.mark.parametrize("codec", ["int8", "kivi2"])
def test_codecs_change_no_flag(codec: str) -> None:
    """Flags are made before anything is quantized, so a prompt that is read in one pass keeps the same entries."""
    from millpond.models.load import load_model

    model = load_model("pond-recall", "f32")
    ids = torch.randint(20, 320, (1, 300), generator=torch.Generator().manual_seed(2))
    kept = []
    for name in ("auto", codec):
        with torch.no_grad(), mp.compress(model, METHOD, None, name) as cache:
            model(ids, cache=cache)
            kept.append(cache.positions(0))
            cache.check_integrity()
    assert kept[0] == kept[1]
