"""Why an answer ended, where a stop text comes to light only as it ends; and the bytes of its tokens."""

from __future__ import annotations

from typing import Any

import pytest

from millpond.engine.completion import CompletionState, with_texts
from millpond.engine.outputs import Completion
from millpond.engine.sampling.params import SamplingParams
from millpond.engine.sampling.sampler import Sampled
from tests.engine.test_detokenizer import tokenizer_of

KINDS = ["byte-level", "byte-fallback"]


def lone(tokenizer: Any) -> int:
    """A token that begins a character."""
    return int(tokenizer.encode("\u00e9", add_special_tokens=False)[-2])


def ended(tokenizer: Any, tokens: list[int], most: int | None = None, **options: Any) -> Completion:
    params = SamplingParams(max_tokens=most or len(tokens), **options)
    ends = frozenset({tokenizer.eos_token_id})
    state = CompletionState(("a", 0), params, most or len(tokens), ends, tokenizer)
    for token in tokens:
        assert not state.finished
        state.append(Sampled(token))
    assert state.finished
    return state.to_output()


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_text_over_lone_bytes_is_why_it_ended(kind: str) -> None:
    """Though that they are no character is clear only when nothing follows."""
    tokenizer = tokenizer_of(kind)
    byte, letter = lone(tokenizer), tokenizer.encode("a", add_special_tokens=False)[-1]
    for tokens in ([byte], [letter, byte, byte], [letter, letter, byte]):
        found = ended(tokenizer, tokens, stop=("\ufffd",))
        assert (found.finish_reason, found.stop_reason) == ("stop", "\ufffd")
        assert "\ufffd" not in found.text
    kept = ended(tokenizer, [letter, byte], stop=("\ufffd",), include_stop=True)
    assert (kept.finish_reason, kept.text[-1]) == ("stop", "\ufffd")
    other = ended(tokenizer, [letter, byte], stop=("x\ufffd",))
    assert (other.finish_reason, other.stop_reason, other.text[-1]) == ("length", None, "\ufffd")


@pytest.mark.parametrize("kind", KINDS)
def test_the_models_own_end_behind_a_stop_text(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    found = ended(tokenizer, [lone(tokenizer), tokenizer.eos_token_id], most=9, stop=("\ufffd",))
    assert (found.finish_reason, found.stop_reason, found.text) == ("stop", "\ufffd", "")
    found = ended(tokenizer, [lone(tokenizer), tokenizer.eos_token_id], most=9, stop=("x",))
    assert (found.finish_reason, found.stop_reason, found.text) == ("stop", None, "\ufffd")


@pytest.mark.parametrize("reason", ["cancelled", "deadline", "error"])
def test_other_reasons_stay(reason: Any) -> None:
    tokenizer = tokenizer_of("byte-level")
    state = CompletionState(("a", 0), SamplingParams(stop=("\ufffd",)), 9, frozenset(), tokenizer)
    state.append(Sampled(lone(tokenizer)))
    state.end(reason)
    assert (state.to_output().finish_reason, state.to_output().text) == (reason, "")


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_text_before_the_fewest_tokens_does_not_count(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    found = ended(tokenizer, [lone(tokenizer)] * 2, stop=("\ufffd",), min_tokens=2)
    assert found.finish_reason == "stop"
    letter = tokenizer.encode("a", add_special_tokens=False)[-1]
    found = ended(tokenizer, [lone(tokenizer), letter], stop=("\ufffd",), min_tokens=2)
    assert (found.finish_reason, found.text.replace(" ", "")) == ("length", "\ufffda")


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_have_the_bytes_of_their_tokens(kind: str) -> None:
    """Those of the likeliest in their place, too; together they are the text."""
    tokenizer = tokenizer_of(kind)
    text = "a 水車 \u00bd"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    found = [with_texts(tokenizer, token, -1.0, [(token, -1.0), (lone(tokenizer), -2.0)]) for token in tokens]
    assert b"".join(one.spelled for one in found).decode().removeprefix(" ") == text
    assert all(one.top_spelled == (one.spelled, b"\xc3") for one in found)
    assert all(one.text == one.spelled.decode("utf-8", "replace") for one in found)
    assert {one.text for one in found} >= {"\ufffd"}
    assert all(one.top[1] == (lone(tokenizer), -2.0, "\ufffd") for one in found)
    nameless = with_texts(None, 7, -1.0, [(7, -1.0)])
    assert (nameless.text, nameless.spelled, nameless.top_spelled) == ("", b"", (b"",))
