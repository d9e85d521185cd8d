"""Long prompts of generate() are read in parts, where that changes nothing and lowers the peak."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import millpond as mp
from millpond.errors import OptionError
from millpond.hf import prompt_parts
from millpond.hf.document import read_document
from tests.helpers.matrix.models import llama, prompts

#: What a method needs to be told here.
GIVEN: dict[str, dict[str, Any]] = {
    "attention_matching": {"ask": "5;6"},
    "kvzip": {"ask": "5;6"},
    "fastgen": {"special": "1", "punctuation": "2;3"},
}
BUDGETLESS = ("full", "minference", "fastgen")
#: Their attention depends on where a prompt is cut.
WHOLE = ("infllm", "minference")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 67 tokens, from 100 on, whatever pays."""
    monkeypatch.setattr(prompt_parts, "PART", 67)
    monkeypatch.setattr(prompt_parts, "UNCUT", 100)
    monkeypatch.setattr(prompt_parts, "_pays", lambda *_: True)


def widths(model: Any, found: list[int]) -> Any:
    """Notes the tokens of each pass; returns the hook."""
    return model.model.register_forward_pre_hook(
        lambda module, args, given: found.append(given["input_ids"].shape[1]), with_kwargs=True
    )


def run(
    method: str,
    ids: Tensor,
    mask: Tensor,
    model: Any = None,
    budget: Any = None,
    given: dict[str, Any] | None = None,
    generate: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor, list[Any], list[int]]:
    """New tokens, their log probabilities, the positions kept and the tokens of each pass of the prompt."""
    model, passes = model or llama("gqa", torch.float32), []
    settings = {} if method in BUDGETLESS else {"budget": budget or 170}
    hook = widths(model, passes)
    try:
        with torch.no_grad(), mp.compress(model, method, **settings, **GIVEN.get(method, {}), **(given or {})) as cache:
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=6,
                do_sample=False,
                cache=cache,
                output_logits=True,
                return_dict_in_generate=True,
                **(generate or {}),
            )
            kept = [[cache.positions(layer, s) for s in range(len(ids))] for layer in range(len(cache.layers))]
            cache.check_integrity()
    finally:
        hook.remove()
    probabilities = torch.stack(out.logits).log_softmax(-1)
    return out.sequences[:, ids.shape[1] :], probabilities, kept, [n for n in passes if n > 1]


@pytest.mark.in_turns(0, of=3)
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("method", sorted(mp.list_methods()))
def test_a_prompt_in_parts_ends_as_the_whole(method: str) -> None:
    """A padded batch: the same tokens, log probabilities within 1e-5 and the same entries, for every method."""
    ids, mask = prompts(2, length=220)
    found, whole = run(method, ids, mask), run(method, ids, mask, generate={"prefill_chunk_size": None})
    assert torch.equal(found[0], whole[0])
    assert (found[1] - whole[1]).abs().max() < 1e-5
    assert found[2] == whole[2]
    if method in WHOLE:
        assert found[3] == [220]
    elif method not in ("attention_matching", "kvzip"):  # which also repeat the prompt
        assert (found[3], whole[3]) == ([55] * 4, [220])


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("method", ["locret", "keydiff"])
def test_eviction_in_chunks_knows_the_end_of_the_prompt(method: str) -> None:
    """In parts and whole, in a padded batch: each chunk has its share of the whole prompt."""
    (ids, mask), given = prompts(2, length=220), {"prefill": "chunks", "chunk": 32}
    found = run(method, ids, mask, given=given, budget="30%")
    whole = run(method, ids, mask, given=given, budget="30%", generate={"prefill_chunk_size": None})
    assert (found[3], whole[3]) == ([55] * 4, [220])
    assert torch.equal(found[0], whole[0])
    assert found[2] == whole[2]


@pytest.mark.covering
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("codec", ["f32", "int4", "kivi2", "mikv", "rotated2"])
@pytest.mark.parametrize("method", ["full", "h2o", "snapkv"])
def test_codes_are_made_at_the_end_of_the_parts(method: str, codec: str) -> None:
    if (method, codec) == ("full", "mikv"):
        pytest.skip("nothing leaves, so there is no lower tier")
    model = mp.load_model("pond-recall", "f32")
    ids = torch.randint(5, 200, (1, 300), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    found, whole = (
        run(method, ids, mask, model, "50%", {"codec": codec}, given) for given in ({}, {"prefill_chunk_size": None})
    )
    assert found[3] == [60] * 5
    assert torch.equal(found[0], whole[0])
    assert found[2] == whole[2]
    assert (found[1][0] - whole[1][0]).abs().max() < 2e-5  # the first token sees no code


@pytest.mark.skipif(not prompt_parts.CUTS_LATER_TURNS, reason="transformers before 5.21 cuts the whole text")
@pytest.mark.usefixtures("small")
def test_a_long_later_turn_is_read_in_parts_too() -> None:
    model, (ids, _) = llama("gqa", torch.float32), prompts(1, length=400)
    ends = []
    for given in ({}, {"prefill_chunk_size": None}):
        passes: list[int] = []
        with torch.no_grad(), mp.compress(model, "h2o", 60) as cache:
            model.generate(ids[:, :150], max_new_tokens=2, do_sample=False, cache=cache, **given)
            hook = widths(model, passes)
            text = torch.cat([ids[:, :150], cache.text.ids[:, 150:].to(ids), ids[:, 150:]], 1)
            out = model.generate(text, max_new_tokens=4, do_sample=False, cache=cache, **given)
            hook.remove()
            ends.append((out.tolist(), cache.positions(0), cache.positions(1), len(passes)))
    assert ends[0][:3] == ends[1][:3]
    assert (ends[0][3], ends[1][3]) == (4 + 3, 1 + 3)


@pytest.mark.usefixtures("small")
def test_transformers_that_reads_a_later_turn_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before 5.21: later turns are not cut, and a stated size is refused."""
    monkeypatch.setattr(prompt_parts, "CUTS_LATER_TURNS", False)
    model, (ids, _) = llama("gqa", torch.float32), prompts(1, length=400)
    with torch.no_grad(), mp.compress(model, "h2o", 60) as cache:
        model.generate(ids[:, :150], max_new_tokens=2, do_sample=False, cache=cache)
        passes: list[int] = []
        hook = widths(model, passes)
        text = torch.cat([ids[:, :150], cache.text.ids[:, 150:].to(ids), ids[:, 150:]], 1)
        with pytest.raises(OptionError, match=r"has read \d+ tokens of it; upgrade it to 5\.21"):
            model.generate(text, max_new_tokens=4, do_sample=False, cache=cache, prefill_chunk_size=50)
        model.generate(text, max_new_tokens=4, do_sample=False, cache=cache)
        hook.remove()
    assert len(passes) == 1 + 3


def test_parts_have_at_most_512_tokens_and_short_prompts_are_whole() -> None:
    ids, mask = prompts(1, length=2100)
    assert run("full", ids, mask)[3] == [420] * 5
    assert run("full", ids[:, :2048], mask[:, :2048])[3] == [2048]
    model = llama("gqa", torch.float32)
    with mp.compress(model, "full") as cache:
        cache._used = True
        sizes = {n: prompt_parts.part_size(model, cache.parts, n) for n in range(2049, 6000)}
    assert all(0 < size <= 512 and n % size != 1 for n, size in sizes.items() if size is not None)
    assert None not in sizes.values()


def test_a_stated_size_is_as_stated_and_evicts_behind_each() -> None:
    ids, mask = prompts(1, length=2100)
    most: list[int] = []
    model = llama("gqa", torch.float32)
    with torch.no_grad(), mp.compress(model, "h2o", 80) as cache:
        hook = model.register_forward_hook(lambda *_: most.append(cache.stats().stored[0][0][0]))
        model.generate(ids, attention_mask=mask, max_new_tokens=2, prefill_chunk_size=300)
        hook.remove()
    assert most == [80] * 8
    assert run("full", ids, mask, generate={"prefill_chunk_size": 300})[3] == [300] * 7
    assert run("full", ids, mask, generate={"prefill_chunk_size": None})[3] == [2100]


@pytest.mark.parametrize(
    "case",
    [("h2o", {"prefill": "greedy"}, {}), ("full", {}, {"output_hidden_states": True})],
    ids=["greedy", "looked at"],
)
def test_whole_where_parts_would_change_what_comes_out(case: tuple[str, dict[str, Any], dict[str, Any]]) -> None:
    method, given, generate = case
    ids, mask = prompts(1, length=2100)
    assert run(method, ids, mask, budget=80, given=given, generate=generate)[3] == [2100]


def test_whole_where_rotations_depend_on_the_length_of_the_text() -> None:
    model = _model(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    assert run("full", *prompts(1, length=2100), model)[3] == [2100]
    assert run("full", *prompts(1, length=2100), _model())[3] == [420] * 5


def test_evicting_methods_read_in_parts_where_that_takes_less() -> None:
    """Until the plan the entries of all layers wait: with many layers that is more than a pass of the whole."""
    ids, mask = prompts(1, length=2100)
    assert len(run("h2o", ids, mask, _model(), 80)[3]) == 5
    deep = _model(num_hidden_layers=8)
    assert run("h2o", ids, mask, deep, 80)[3] == [2100]
    assert len(run("full", ids, mask, deep)[3]) == 5


def test_a_limit_of_bytes_is_kept_layer_by_layer() -> None:
    """What waits for a plan might not fit it."""
    ids, mask = prompts(1, length=2100)
    given = {"memory_limit": "1MiB"}
    assert run("h2o", ids, mask, _model(), 80, given)[3] == [2100]


@pytest.mark.usefixtures("small")
def test_a_document_is_read_in_parts() -> None:
    model, (ids, _) = llama("gqa", torch.float32), prompts(1, length=220)
    kept = []
    for chunk in (None, 220):
        passes: list[int] = []
        with torch.no_grad(), mp.compress(model, "snapkv", 60) as cache:
            hook = widths(model, passes)
            read_document(model, cache, ids, chunk)
            hook.remove()
            kept.append([cache.positions(layer) for layer in range(2)])
            assert passes == ([55] * 4 if chunk is None else [220])
    assert kept[0] == kept[1]


@pytest.mark.usefixtures("small")
def test_what_was_broken_off_between_two_parts_can_go_on() -> None:
    model, (ids, mask) = llama("gqa", torch.float32), prompts(1, length=220)
    expected = run("h2o", ids, mask, budget=60)

    def stop(*_: Any) -> None:
        if cache.tracker.columns == 110:
            raise KeyboardInterrupt

    with torch.no_grad(), mp.compress(model, "h2o", 60) as cache:
        hook = model.register_forward_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            model.generate(ids, max_new_tokens=6, do_sample=False, cache=cache)
        hook.remove()
        out = model.generate(ids, max_new_tokens=6, do_sample=False, cache=cache)
        assert torch.equal(out[:, 220:], expected[0])
        assert not any(layer_cache.pending for layer_cache in cache.layer_caches)
        cache.check_integrity()


def _model(**options: Any) -> Any:
    """A Llama whose passes are larger than the entries of its two layers."""
    torch.manual_seed(0)
    config: Any = LlamaConfig(
        **{
            "vocab_size": 96,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "max_position_embeddings": 512,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": None,
            **options,
        }
    )
    return LlamaForCausalLM(config).eval()
