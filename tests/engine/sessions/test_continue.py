"""Turns that continue stored ones say what `generate` says with the cache of the turns before, restarted or not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import millpond as mp
from millpond.engine.request import CacheOptions, Request
from millpond.engine.sessions.stored_turn import StoredTurn, TurnPlace
from millpond.errors import OptionError
from tests.helpers.engine.sessions import NEW, TURNS, ask, kv, model, open_engine, said, stored, words

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

METHODS = ("full", "h2o", "snapkv", "streaming", "ada", "kvmerger", "expected_attention")
#: Those whose entries a format of codes can hold.
CASES = [(method, codec) for codec in (None, "int4") for method in METHODS if codec is None or method != "streaming"]
BUDGETS = {"full": None}


@cache
def undisturbed(method: str, codec: str | None) -> list[list[int]]:
    """What one cache that lives through all turns answers."""
    answers, ids = [], []
    with mp.compress(model(), method, BUDGETS.get(method, "50%"), codec or "auto") as kept:
        for turn, length in enumerate(TURNS):
            ids += words(length, turn)
            asked = torch.tensor([ids])
            out = model().generate(
                asked,
                attention_mask=torch.ones_like(asked),
                cache=kept,
                max_new_tokens=NEW,
                do_sample=False,
                pad_token_id=0,
            )
            answers.append(out[0, len(ids) :].tolist())
            ids = out[0].tolist()
    return answers


@pytest.mark.in_turns(0, of=2)
@pytest.mark.parametrize(("method", "codec"), CASES)
def test_a_restart_changes_no_token(method: str, codec: str | None, tmp_path: Path) -> None:
    expected, ids, read = undisturbed(method, codec), list[int](), 0
    for turn, length in enumerate(TURNS):
        engine = open_engine(tmp_path, method, codec)
        ids += words(length, turn)
        output = ask(engine, ids)
        assert said(output) == expected[turn], turn
        assert kv(output).restored_tokens == read
        assert kv(output).exact == (turn == 0 or (method == "full" and codec is None))
        assert engine.stats().prompt_tokens == len(ids) - read
        assert engine.stats().restored_tokens == read
        ids += said(output)
        read = len(ids) - 1
        engine.close()
    assert len(stored(tmp_path)) == len(TURNS)


def test_drawn_tokens_are_the_same_after_a_restart(tmp_path: Path) -> None:
    engine = open_engine(tmp_path)
    ids = words(60, 1)
    ids += said(ask(engine, ids, temperature=1.0, seed=7)) + words(9, 2)
    first = said(ask(engine, ids, temperature=1.0, seed=8, new=12))
    engine.close()
    again = open_engine(tmp_path)
    output = ask(again, ids, temperature=1.0, seed=8, new=12)
    assert said(output) == first
    assert kv(output).restored_tokens == 60 + NEW - 1
    again.close()


def test_it_is_not_what_reading_the_whole_prompt_says(tmp_path: Path) -> None:
    """So that the tests above could fail."""
    engine, plain = open_engine(tmp_path, "h2o"), open_engine(None, "h2o")
    ids = words(TURNS[0], 0)
    ids += said(ask(engine, ids)) + words(TURNS[1], 1)
    values = []
    for one in (engine, plain):
        logprobs = ask(one, ids, logprobs=0).completions[0].logprobs
        assert logprobs is not None
        values.append(logprobs[-1].logprob)
    assert abs(values[0] - values[1]) > 1e-4
    engine.close()
    plain.close()


def test_the_longest_stored_beginning_goes_on_and_branches_do_too(tmp_path: Path) -> None:
    engine = open_engine(tmp_path, "full")
    begin = words(40, 0)
    one = begin + said(ask(engine, begin)) + words(8, 1)
    two = one + said(ask(engine, one)) + words(8, 2)
    other = one[:-8] + words(8, 3)
    assert kv(ask(engine, two)).restored_tokens == len(one) + NEW - 1
    assert kv(ask(engine, other)).restored_tokens == len(begin) + NEW - 1, "another question after the first answer"
    assert kv(ask(engine, begin)).restored_tokens == 0, "nothing that is stored is shorter"
    assert kv(ask(engine, words(50, 9))).restored_tokens == 0
    plain = open_engine(None, "full")
    assert said(ask(engine, other)) == said(ask(plain, other))
    engine.close()
    plain.close()


def test_an_answer_of_one_token_is_stored(tmp_path: Path) -> None:
    engine = open_engine(tmp_path)
    ids = words(40, 0)
    output = ask(engine, ids, new=1)
    assert kv(output).held == 20, "it was planned"
    ids += said(output) + words(5, 1)
    assert kv(ask(engine, ids)).restored_tokens == 40
    engine.close()


@pytest.mark.parametrize(("method", "name"), [("snapkv", "0.queries"), ("expected_attention", "0.moments.total")])
def test_what_later_plans_look_at_is_stored(method: str, name: str, tmp_path: Path) -> None:
    engine = open_engine(tmp_path, method)
    ids = words(40, 0)
    ids += said(ask(engine, ids))
    (file,) = stored(tmp_path)
    place = TurnPlace.of(file)
    assert place is not None
    assert name in StoredTurn.from_bytes(file.read_bytes(), place, np.array(ids[: place.length])).tensors
    engine.close()


def test_an_approximate_turn_makes_no_exact_one(tmp_path: Path) -> None:
    engine = open_engine(tmp_path, "full")
    ids = words(40, 0)
    ids += said(ask(engine, ids)) + words(5, 1)
    (file,) = stored(tmp_path)
    place = TurnPlace.of(file)
    assert place is not None
    turn = StoredTurn.from_bytes(file.read_bytes(), place, np.array(ids[: place.length]))
    file.write_bytes(replace(turn, exact=False).to_bytes(place))
    for _ in range(2):  # of it, and of the turn behind it
        output = ask(engine, ids)
        assert kv(output).restored_tokens == len(ids) - 6
        assert not kv(output).exact
        ids += said(output) + words(5, 2)
    engine.close()


def test_every_answer_of_a_request_is_stored(tmp_path: Path) -> None:
    engine = open_engine(tmp_path)
    ids = words(40, 0)
    output = ask(engine, ids, n=3, temperature=1.5, seed=1)
    for completion in output.completions:
        later = [*ids, *completion.token_ids, *words(4, 2)]
        assert kv(ask(engine, later)).restored_tokens == 40 + NEW - 1
    engine.close()


def test_other_methods_budgets_codecs_and_salts_are_misses(tmp_path: Path) -> None:
    engine = open_engine(tmp_path, "h2o")
    ids = words(60, 0)
    ids += said(ask(engine, ids, salt="mine")) + words(5, 1)
    others = [
        CacheOptions(method="snapkv"),
        CacheOptions(budget="25%"),
        CacheOptions(codec="int4"),
        CacheOptions(options={"recent": 0.25}),
    ]
    for options in others:
        assert kv(ask(engine, ids, salt="mine", cache_options=options)).restored_tokens == 0, options
    assert kv(ask(engine, ids, salt="other")).restored_tokens == 0
    assert kv(ask(engine, ids)).restored_tokens == 0
    assert kv(ask(engine, ids, salt="mine")).restored_tokens == 60 + NEW - 1
    assert engine.stats().sessions is not None
    assert engine.stats().sessions.torn == 0
    engine.close()


def test_methods_that_cannot_continue_are_refused_or_read_anew(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="one of method 'infllm' cannot be continued: it reads a prompt in one pass"):
        open_engine(tmp_path, "infllm")
    engine = open_engine(tmp_path, "h2o")
    ids, options = words(60, 0), CacheOptions(method="infllm")
    ids += said(ask(engine, ids, cache_options=options)) + words(5, 1)
    assert kv(ask(engine, ids, cache_options=options)).restored_tokens == 0
    assert not stored(tmp_path)
    engine.close()


def test_prompts_whose_log_probabilities_are_wanted_are_read(tmp_path: Path) -> None:
    engine = open_engine(tmp_path, "full")
    ids = words(40, 0)
    ids += said(ask(engine, ids)) + words(5, 1)
    output = ask(engine, ids, prompt_logprobs=0)
    assert kv(output).restored_tokens == 0
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(ids)
    engine.close()


def test_a_prefix_cache_and_sessions_do_not_mix(tmp_path: Path) -> None:
    """Pages behind a compressed turn are nobody else's beginning; `ask` checks that."""
    engine, plain = open_engine(tmp_path, "snapkv", prefix_cache=True), open_engine(None, "snapkv")
    ids = words(60, 0)
    ids += said(ask(engine, ids)) + words(20, 1)
    restored = ask(engine, ids)
    assert kv(restored).restored_tokens == 60 + NEW - 1
    ask(engine, ids, salt="other")
    unsalted = ask(engine, ids, cache_options=CacheOptions(budget="40%"))
    assert kv(unsalted).restored_tokens == 0
    assert said(unsalted) == said(ask(plain, ids, cache_options=CacheOptions(budget="40%")))
    engine.close()
    plain.close()


def test_without_room_the_prompt_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(tmp_path, "full")
    ids = words(40, 0)
    ids += said(ask(engine, ids)) + words(5, 1)
    reuse = engine._parts.sessions
    assert reuse is not None
    monkeypatch.setattr(reuse, "_has", lambda pages: False)
    assert kv(ask(engine, ids)).restored_tokens == 0
    monkeypatch.undo()
    assert kv(ask(engine, [*ids, 5])).restored_tokens > 0, "the next is not poisoned"
    engine.close()


def test_requests_that_decode_together_continue_their_own_turns(tmp_path: Path) -> None:
    engine, params = open_engine(tmp_path, "h2o"), mp.SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    texts = [words(30 + 7 * i, i) for i in range(4)]
    texts = [ids + said(ask(engine, ids)) + words(6, 50 + i) for i, ids in enumerate(texts)]
    alone = [said(ask(engine, ids)) for ids in texts]
    for i, ids in enumerate(texts):
        engine.add(Request(request_id=str(i), prompt=tuple(ids), params=params))
    done = {output.request_id: output for output in engine.drain()}
    assert [said(done[str(i)]) for i in range(4)] == alone
    assert all(kv(output).restored_tokens for output in done.values())
    engine.close()


def test_a_disk_limit_needs_a_folder() -> None:
    with pytest.raises(OptionError, match="cache_disk=1073741824 limits the files in cache_dir="):
        open_engine(None, cache_disk="1GiB")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="sessions cannot be stored in"):
        open_engine(tmp_path / "file" / "sessions")
