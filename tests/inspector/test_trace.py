"""Traces against the cache that they speak of, and the texts of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from millpond.errors import DataError, OptionError
from millpond.hf.cache import MillpondCache
from millpond.hf.compress import compress
from millpond.inspector.token_text import continuation, encode_pieces
from millpond.inspector.trace import Trace, levels_of, read_trace, scores_of
from millpond.inspector.trace_recorder import Recorder, record_trace
from tests.helpers.evals.small import text, tiny_model, tiny_tokenizer

NEW = 9
Seen = dict[tuple[int, int, int], list[tuple[int, float]]]


def traced(method: str = "h2o", budget: str | int | None = "20%", new: int = NEW, **options: Any) -> tuple[Trace, Seen]:
    """A trace, and what `LayerCache.read` said at each step: {(step, layer, head): [(position, score), ...]}."""
    seen: Seen = {}
    steps = iter(range(new))
    with compress(tiny_model(), method, budget, **options) as cache:
        before = Recorder.put

        def put(self: Recorder, value: Any) -> None:
            if self._saw_prompt:
                note(cache, next(steps), seen)
            before(self, value)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Recorder, "put", put)
            coded = encode_pieces(tiny_tokenizer(), text(60, 3))
            made = record_trace(tiny_model(), tiny_tokenizer(), cache, coded, {"method": method}, new)
    return made, seen


def note(cache: MillpondCache, step: int, seen: Seen) -> None:
    for layer, layer_cache in enumerate(cache.layer_caches):
        dense = layer_cache.read(0)
        for head, (positions, scores) in enumerate(zip(dense.positions.tolist(), dense.scores.tolist(), strict=True)):
            seen[step, layer, head] = [(p, s) for p, s in zip(positions, scores, strict=True) if p >= 0]


@pytest.mark.parametrize(
    ("method", "budget"), [("h2o", "20%"), ("ada", 36), ("window", 16), ("full", None), ("random", "50%")]
)
def test_a_trace_tells_what_the_cache_held(method: str, budget: str | int | None) -> None:
    trace, seen = traced(method, budget)
    assert (trace.n_steps, trace.n_prompt, len(trace.tokens)) == (NEW - 1, 61, 61 + NEW)
    assert len(seen) == NEW * 2 * 2
    for (step, layer, head), entries in seen.items():
        assert trace.kept(layer, head, step) == [p for p, _ in entries]


def test_scores_are_those_of_the_cache_up_to_their_levels() -> None:
    trace, seen = traced()
    assert trace.score_steps == tuple(range(NEW))
    told = 0
    for (step, layer, head), entries in seen.items():
        found = trace.scores(layer, head, step)
        track = trace.heads[layer][head]
        error = (track.high / track.low) ** (1 / 508) - 1
        for position, score in entries:
            assert found[position] == pytest.approx(score, rel=error + 1e-6)
            told += score > 0
    assert told > 100


def test_a_long_trace_keeps_scores_of_fewer_steps() -> None:
    whole, _ = traced()
    coded = encode_pieces(tiny_tokenizer(), text(60, 3))
    with compress(tiny_model(), "h2o", "20%") as cache:
        few = record_trace(tiny_model(), tiny_tokenizer(), cache, coded, {}, NEW, score_bytes=150)
    assert few.score_steps == (0, 4, 8)
    assert few.scores(0, 0, 7).keys() == whole.scores(0, 0, 4).keys()
    assert [few.kept(1, 1, step) for step in range(NEW)] == [whole.kept(1, 1, step) for step in range(NEW)]


def test_a_method_without_scores_has_none() -> None:
    trace, _ = traced("window", "20%")
    assert trace.scores(0, 0, 3) == {}


def test_generation_is_what_it_is_without_a_trace() -> None:
    trace, _ = traced()
    coded = encode_pieces(tiny_tokenizer(), text(60, 3))
    ids = torch.tensor([coded.ids])
    with compress(tiny_model(), "h2o", "20%") as cache:
        out = tiny_model().generate(ids, cache=cache, max_new_tokens=NEW, do_sample=False)
    assert "".join(trace.tokens) == "<bos>" + text(60, 3) + "".join(
        continuation(tiny_tokenizer(), out[0].tolist(), len(coded.ids))
    )


def test_bytes_are_those_of_the_cache() -> None:
    trace, _ = traced("full", None)
    entry = 2 * 8 * 8 * 2 * 2  # key and value, head_dim, float64, heads, layers
    assert trace.full_kv_bytes == tuple(entry * (61 + step) for step in range(NEW))
    assert all(held >= full for held, full in zip(trace.kv_bytes, trace.full_kv_bytes, strict=True))


def test_a_trace_survives_its_file(tmp_path: Path) -> None:
    trace, _ = traced()
    trace.write(tmp_path / "deep" / "a.trace.json")
    assert read_trace(tmp_path / "deep" / "a.trace.json") == trace


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 99}', '{"format": 1, "heads": []}'])
def test_what_is_no_trace_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match="is no trace"):
        read_trace(tmp_path / "a.json")


@pytest.mark.parametrize(
    "change", [{"tokens": [1]}, {"n_prompt": "4"}, {"kv_bytes": [None]}, {"heads": [[{"first": ["x"]}]]}, {"other": 1}]
)
def test_a_trace_with_values_of_other_types_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    trace, _ = traced()
    path = tmp_path / "a.trace.json"
    trace.write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match="is no trace"):
        read_trace(path)


def test_what_was_not_traced_is_refused() -> None:
    trace, _ = traced()
    for place, sentence in (((9, 0, 0), "layers 0 to 1"), ((0, 9, 0), "heads 0 to 1"), ((0, 0, NEW), "steps 0 to 8")):
        with pytest.raises(OptionError, match=sentence):
            trace.kept(*place)
    with compress(tiny_model()) as cache, pytest.raises(OptionError, match="at least 1"):
        record_trace(tiny_model(), tiny_tokenizer(), cache, encode_pieces(tiny_tokenizer(), "w2"), {}, 0)


def test_levels_keep_order_and_zero() -> None:
    scores = np.array([0.0, 1e-4, 3e-4, 0.2, 7.0, 50.0])
    levels = levels_of(scores, 1e-4, 50.0)
    assert levels.tolist() == sorted(levels.tolist())
    assert (levels[0], levels[1], levels[-1]) == (0, 1, 255)
    assert scores_of(levels, 1e-4, 50.0) == pytest.approx(scores, rel=0.03)
    assert scores_of(levels_of(np.array([0.0, 2.0]), 2.0, 2.0), 2.0, 2.0).tolist() == [0.0, 2.0]


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """A token per byte, so that a character may take several."""
    core = Tokenizer(BPE({sign: i for i, sign in enumerate(sorted(ByteLevel.alphabet()))}, []))
    core.pre_tokenizer = ByteLevel(add_prefix_space=False)
    core.decoder = ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.mark.parametrize("words", ["w2 w3", "  w2\n\n\tw3  w4", "w5"])
def test_pieces_joined_are_the_text(words: str) -> None:
    coded = encode_pieces(tiny_tokenizer(), words)
    assert coded.special == (0,)
    assert coded.pieces[0] == "<bos>"
    assert "".join(coded.pieces[1:]) == words
    assert len(coded.pieces) == len(coded.ids)


def test_a_character_of_several_tokens_stays_whole() -> None:
    words = "né 水車 — x"
    coded = encode_pieces(byte_tokenizer(), words)
    assert len(coded.ids) == len(words.encode())
    assert "".join(coded.pieces) == words
    assert continuation(byte_tokenizer(), list(coded.ids), 0)[-1] == "x"
    assert "".join(continuation(byte_tokenizer(), list(coded.ids), 0)) == words
    assert "".join(continuation(byte_tokenizer(), list(coded.ids), 4)) == words[3:]
    with pytest.raises(OptionError, match="no token"):
        encode_pieces(byte_tokenizer(), "")
