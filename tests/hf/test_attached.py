"""Inside a cache's `with` block `generate` uses it; prompts that would be read half are refused; wrappers."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

import millpond as mp
from millpond.errors import CacheMismatchError, OptionError, UnsupportedModelError
from millpond.hf.generation import UnusedCacheWarning
from tests.helpers.hf.families import family
from tests.helpers.matrix.models import llama, prompts

SETTINGS: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


def run(ids: Tensor, model: Any = None, **more: Any) -> Tensor:
    out: Tensor = (llama() if model is None else model).generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), **{**SETTINGS, **more}
    )
    return out


def passed(ids: Tensor, method: str = "h2o", budget: int = 16) -> Tensor:
    """With the cache as an argument."""
    with mp.compress(llama(), method, budget) as cache:
        return run(ids, cache=cache)


def test_each_generate_inside_the_block_is_a_new_prompt_of_the_cache() -> None:
    texts = [prompts(1, 40, seed)[0] for seed in (1, 2, 1)]
    stock = [run(ids) for ids in texts]
    with mp.compress(llama(), "h2o", 16) as cache:
        for ids in texts:
            assert torch.equal(run(ids), passed(ids))
            assert cache.stats().seen == [45]
            assert cache.stats().evicted > 0
    assert [run(ids).tolist() for ids in texts] == [ids.tolist() for ids in stock]
    assert "generate" not in llama().__dict__


def test_the_innermost_cache_of_the_thread_is_used() -> None:
    ids = prompts(1, 40)[0]
    with mp.compress(llama(), "h2o", 16) as outer, mp.compress(llama(), "snapkv", 34) as inner:
        run(ids)
        assert (outer.stats().seen, inner.stats().seen) == ([], [45])
        run(ids, cache=outer)
        assert outer.stats().seen == [45]
        stock: list[Tensor] = []
        thread = threading.Thread(target=lambda: stock.append(run(ids, cache=None)))
        thread.start()
        thread.join()
    assert torch.equal(stock[0], run(ids))


def test_attach_false_leaves_generate_alone() -> None:
    ids = prompts(1, 40)[0]
    stock = run(ids)
    with mp.compress(llama(), "h2o", 16, attach=False) as cache:
        assert "generate" not in llama().__dict__
        assert torch.equal(run(ids), stock)
        assert cache.stats().seen == []
        assert not torch.equal(run(ids, cache=cache), stock)


def test_a_text_that_was_read_otherwise_is_gone_on_with() -> None:
    ids = prompts(1, 40)[0]
    with torch.no_grad(), mp.compress(llama(), "h2o", 16) as cache:
        llama()(ids[:, :30], cache=cache)
        kept = run(ids, cache=cache)
    with torch.no_grad(), mp.compress(llama(), "h2o", 16) as cache:
        llama()(ids[:, :30], cache=cache)
        assert torch.equal(run(ids), kept)
        run(ids.flip(1))  # unrelated: begins anew
        assert cache.stats().seen == [45]


@pytest.mark.parametrize("more", [{"use_cache": False}, {"cache_implementation": "dynamic"}])
@pytest.mark.parametrize("explicit", [False, True])
def test_what_would_leave_the_cache_aside_is_refused(more: dict[str, Any], explicit: bool) -> None:
    ids = prompts(1, 40)[0]
    with mp.compress(llama(), "h2o", 16) as cache:
        run(ids)
        cache.reset()
        given = {"cache": cache} if explicit else {}
        with pytest.raises(OptionError, match=next(iter(more))):
            run(ids, **given, **more)


@pytest.mark.parametrize("use_cache", [None, False])
def test_a_pass_that_carries_the_cache_and_refuses_it_is_refused(use_cache: bool | None) -> None:
    ids = prompts(1, 40)[0]
    with torch.no_grad(), mp.compress(llama(), "h2o", 16) as cache:
        if use_cache is None:
            llama()(ids, cache=cache)
            return
        with pytest.raises(OptionError, match="use_cache=False"):
            llama()(ids, cache=cache, use_cache=use_cache)
        cache._used = True


def test_an_unrelated_prompt_on_a_cache_that_is_passed_is_refused() -> None:
    ids, other = prompts(1, 40)[0], prompts(1, 60, 2)[0]
    with mp.compress(llama(), "h2o", 16) as cache:
        answer = run(ids, cache=cache)
        with pytest.raises(CacheMismatchError, match=r"read another text: token 0 of sequence 0 is.*cache\.reset\(\)"):
            run(other, cache=cache)
        with pytest.raises(CacheMismatchError, match="has read 45 tokens, and the prompt has 40"):
            run(ids, cache=cache)
        assert run(torch.cat([answer, other[:, :5]], 1), cache=cache).shape == (1, 57)
        cache.reset()
        run(other, cache=cache)


def test_turns_may_bring_only_what_is_new() -> None:
    ids, more = prompts(1, 40)[0], torch.tensor([[7, 8, 9]])
    outs = []
    for whole in (True, False):
        with mp.compress(llama(), "h2o", 16) as cache:
            text = torch.cat([run(ids, cache=cache), more], 1)
            last = text if whole else text[:, -4:]  # the last token of an answer was not read yet
            out: Any = llama().generate(input_ids=last, attention_mask=torch.ones_like(text), cache=cache, **SETTINGS)
            outs.append(out[0, -6:].tolist())
    assert outs[0] == outs[1]


def test_beams_and_several_answers_go_on() -> None:
    ids, mask = prompts(2, 40)
    with mp.compress(llama(), "h2o", 16) as cache:
        out: Any = llama().generate(input_ids=ids, attention_mask=mask, num_beams=3, **SETTINGS)
        stats = cache.stats()
    assert len(out) == 2
    assert stats.evicted > 0


def test_a_cache_that_nothing_used_is_told_of() -> None:
    with pytest.warns(UnusedCacheWarning, match="never used"), mp.compress(llama(), "h2o", 16):
        pass
    cache = mp.compress(llama(), "h2o", 16)
    with pytest.warns(UnusedCacheWarning):
        cache.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.close()
        with pytest.raises(ZeroDivisionError), mp.compress(llama(), "h2o", 16):
            raise ZeroDivisionError


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft's
def test_a_peft_model_is_unwrapped() -> None:
    ids = prompts(1, 40)[0]
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(family("llama").make(), settings)
    stock = run(ids, model)
    with mp.compress(model, "full") as cache:  # type: ignore[arg-type]
        assert torch.equal(run(ids, model), stock)
        assert cache.stats().seen == [45]
        cache.reset()
        assert torch.equal(run(ids, model, cache=cache), stock)
    with mp.LLM(model, method="full") as llm:
        out = llm.generate([ids[0].tolist()], mp.SamplingParams(max_tokens=6, temperature=0))
        assert list(out[0].completions[0].token_ids) == stock[0, -6:].tolist()
    prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(UnsupportedModelError, match="prefix and prompt tuning"):
        mp.compress(peft.get_peft_model(family("llama").make(), prefix))  # type: ignore[arg-type]


def test_a_compiled_model_is_unwrapped_or_told_of() -> None:
    ids, model = prompts(1, 40)[0], family("llama").make()
    compiled = torch.compile(model)
    stock = run(ids, model)
    with mp.compress(compiled, "full") as cache:
        assert torch.equal(run(ids, compiled), stock)
        assert cache.stats().seen == [45]
    model.compile()
    with pytest.raises(UnsupportedModelError, match="compiled in place"):
        mp.compress(model, "full")
