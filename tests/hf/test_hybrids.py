"""Hybrids: entries of attention layers in pages, states of the others in transformers' own layers; equal to stock."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import DynamicCache

import millpond as mp
from millpond.hf.document import checksum
from millpond.hf.model_profile import RESTARTING
from millpond_lab.bench.model_types.greedy import compare, generated, masked_run, prompts
from millpond_lab.bench.model_types.tiny_model import tiny_model
from tests.helpers.hf.tiny_types import STEPS, WITHIN, ids_of, model_of, stock_of, write

FAST = ["lfm2", "qwen3_next", "zamba2", "jamba"]
#: With the ones above all hybrids that write text, but for those that the page of types has as refused.
OTHERS = [
    "bamba",
    "bailing_hybrid",
    "falcon_h1",
    "granitemoehybrid",
    "kimi_linear",
    "lfm2_moe",
    "lfm3",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "zamba",
    "zaya",
]
ALL = [*FAST, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)]


@pytest.mark.parametrize("kind", ALL)
@torch.no_grad()
def test_everything_kept_is_stock(kind: str) -> None:
    with mp.compress(model_of(kind), "full") as held:
        run = generated(model_of(kind), held, new=STEPS)
        compare(run, stock_of(kind), kind, WITHIN)
        assert held.get_seq_length() == run.ids.shape[1] - 1
        stats = held.stats()
        states = [s for layer in held.states.layers.values() for s in (layer.conv_states, layer.recurrent_states)]
        assert stats.state_bytes == sum(t.nbytes for s in states for t in s.values() if t is not None) > 0
        assert stats.kv_bytes > 0
        assert stats.evicted == 0 or model_of(kind).config.sliding_window
        both = set(stats.state_layers) | set(stats.entry_layers)
        assert len(stats.stored) == len(stats.entry_layers)
        assert both <= set(range(len(held.layers)))


@pytest.mark.covering
@pytest.mark.filterwarnings("ignore::millpond.hf.layer_budgets.FewEntriesWarning")
@pytest.mark.parametrize("method", ["h2o", "snapkv"])
@pytest.mark.parametrize("kind", ALL)
@torch.no_grad()
def test_half_of_the_entries_are_a_mask_over_all(kind: str, method: str) -> None:
    options = {"snapkv": {"window": 4}, "h2o": {}}[method]
    with mp.compress(model_of(kind), method, 0.5, **options) as held:
        run = generated(model_of(kind), held, new=STEPS)
        held.check_integrity()
        assert held.stats().evicted > 0
    compare(run, masked_run(model_of(kind), run), f"{kind}, {method}", WITHIN)


@pytest.mark.parametrize("kind", FAST)
@torch.no_grad()
def test_beams_take_their_states_along(kind: str) -> None:
    ids, mask = prompts()
    model, settings = model_of(kind), {"attention_mask": mask, "num_beams": 3, "new": 12}
    stock = write(model, ids, **settings)
    with mp.compress(model, "full") as held:
        assert torch.equal(write(model, ids, **settings), stock)
        held.reset()
        assert held.stats().state_bytes == 0
        assert torch.equal(write(model, ids, **settings), stock)  # of another size than a cache that was reset


@pytest.mark.parametrize("kind", FAST)
@torch.no_grad()
def test_a_later_turn_goes_on_from_the_states(kind: str) -> None:
    model, ids, turn = model_of(kind), ids_of(20, batch=2), ids_of(5, 4, 2)
    with mp.compress(model, "full") as held:
        first = write(model, ids, cache=held, attention_mask=torch.ones_like(ids))
        both = torch.cat([first, turn], 1)
        mask = torch.ones_like(both)
        if kind in RESTARTING:
            with pytest.raises(mp.errors.UnsupportedModelError, match=r"6 tokens behind 27 .* begins its recurrent st"):
                write(model, both, cache=held, attention_mask=mask)
            held.reset()
        second = write(model, both, cache=held, attention_mask=mask)
    assert torch.equal(second, write(model, both, attention_mask=mask))


@pytest.mark.parametrize("kind", ALL)
@torch.no_grad()
def test_a_prompt_in_chunks_is_one_prompt_or_refused(kind: str) -> None:
    model, ids, at = model_of(kind), ids_of(24), torch.arange(24)[None]
    settings: dict[str, Any] = {"position_ids": at} if kind == "bamba" else {}  # which counts from 0 without
    whole = model(ids, cache=DynamicCache(config=model.config)).logits

    def in_chunks(used: Any) -> float:
        parts = []
        for n in range(0, 24, 7):
            given = {name: t[:, n : n + 7] for name, t in settings.items()}
            parts.append(model(ids[:, n : n + 7], cache=used, **given).logits)
        return float((torch.cat(parts, 1) - whole).abs().max() / whole.abs().max())

    stock = in_chunks(DynamicCache(config=model.config))
    assert (stock > 0.01) == (kind in RESTARTING), "transformers itself is another now: correct the list"
    with mp.compress(model, "full") as held:
        if kind in RESTARTING:
            with pytest.raises(mp.errors.UnsupportedModelError, match=r"7 tokens behind 7 .* begins its recurrent st"):
                in_chunks(held)
        else:
            assert in_chunks(held) < WITHIN


@pytest.mark.parametrize("kind", FAST)
@torch.no_grad()
def test_a_fork_has_states_of_its_own(kind: str) -> None:
    model, ids, next_one = model_of(kind), ids_of(20), ids_of(1, 5)
    with mp.compress(model, "h2o", 64) as held:
        model(ids, cache=held)
        before = copy.deepcopy([list(layer.conv_states.values()) for layer in held.states.layers.values()])
        with held.fork() as other:
            found = write(model, torch.cat([ids, next_one], 1), cache=other)
        assert all(
            a is None or torch.equal(a, b)
            for layer, old in zip(held.states.layers.values(), before, strict=True)
            for a, b in zip(old, layer.conv_states.values(), strict=True)
        )
        again = write(model, torch.cat([ids, next_one], 1), cache=held)
        assert torch.equal(found, again)


def test_what_cannot_go_back_is_refused() -> None:
    model, ids = model_of("lfm2"), ids_of(20)
    with mp.compress(model, "full") as held:
        with pytest.raises(mp.errors.OptionError, match="states of layers 0 cannot go back, as assisted and prompt-l"):
            write(model, ids, cache=held, prompt_lookup_num_tokens=3)
        held.reset()
        write(model, ids, cache=held)
        with pytest.raises(mp.errors.CacheMismatchError, match="cannot take back 2 tokens: the recurrent and conv"):
            held.crop(-2)
        held.crop(0)
        assert not held.is_croppable
        with pytest.raises(mp.errors.CacheMismatchError, match=r"layer 0: .* 0 to 1, of which 1 hold entries"):
            held.positions(0)
    with pytest.raises(mp.errors.UnsupportedModelError, match=r"repeats the prompt, .* states of layers 0"):
        mp.compress(model, "kvzip", 16, ask="none")
    with pytest.raises(mp.errors.UnsupportedModelError, match="has no attention layers"):
        mp.compress(tiny_model("falcon_mamba"), "h2o")
    with pytest.raises(mp.errors.UnsupportedModelError, match="keeps recurrent states in its modules"):
        mp.compress(tiny_model("recurrent_gemma"), "h2o")


@pytest.mark.covering
@pytest.mark.parametrize("method", ["full", "h2o"])
@pytest.mark.parametrize("kind", ["lfm2", "qwen3_next", "zamba2", "falcon_h1"])
@torch.no_grad()
def test_a_document_holds_the_states(kind: str, method: str, tmp_path: Path) -> None:
    model, ids, question, path = model_of(kind), ids_of(30), ids_of(4, 5), tmp_path / "text.safetensors"
    both = torch.cat([ids, question], 1)
    with mp.compress(model, method, None if method == "full" else 16) as held:
        model(ids, cache=held)
        mp.save_document(held, ids, path)
        expected = write(model, both, cache=held)
        assert held.stats().state_bytes > 0
    restored, known = mp.restore_document(model, path)
    with restored:
        assert torch.equal(known, ids)
        assert restored.stats().state_bytes > 0
        assert torch.equal(write(model, both, cache=restored), expected)
    if method == "full":
        assert torch.equal(expected, write(model, both))


@torch.no_grad()
def test_a_document_without_its_states_is_refused(tmp_path: Path) -> None:
    model, ids, path = model_of("lfm2"), ids_of(20), tmp_path / "text.safetensors"
    with mp.compress(model, "full") as held:
        model(ids, cache=held)
        mp.save_document(held, ids, path)
    with safe_open(path, "pt") as file:
        about, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    (name,) = [name for name in tensors if name.startswith("state.")]
    save_file(tensors | {name: tensors[name] + 1}, path, about)
    with pytest.raises(mp.errors.DataError, match="its checksum differs"):
        mp.restore_document(model, path)
    for changed, why in ((None, "layer 0: the file lacks its states"), (tensors[name].repeat(2, 1, 1), "of one text")):
        others = {other: tensor for other, tensor in tensors.items() if other != name}
        given = others if changed is None else others | {name: changed}
        save_file(given, path, about | {"checksum": checksum(about, given)})
        with pytest.raises(mp.errors.DataError, match=why):
            mp.restore_document(model, path)


def test_an_interrupted_pass_is_seen_though_no_entry_was_written() -> None:
    model, ids = model_of("lfm2"), ids_of(20)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with mp.compress(model, "full") as held, torch.no_grad():
        hook = model.model.layers[0].register_forward_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            model(ids, cache=held)
        hook.remove()
        with pytest.raises(mp.errors.CacheMismatchError, match="interrupted; call reset"):
            held.fork()
        with pytest.raises(mp.errors.CacheMismatchError, match="interrupted, and recurrent states"):
            model(ids, cache=held)
        held.reset()
        assert torch.equal(write(model, ids, cache=held), write(model, ids))
