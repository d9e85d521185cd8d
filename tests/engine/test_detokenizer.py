"""Text token by token against decoding the whole, for every kind of tokenizer; stop texts against a plain search."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from millpond.engine.detokenizer import MAX_TOKENS, IncrementalDetokenizer, Writer
from millpond.engine.sampling.params import SamplingParams
from millpond.engine.token_bytes import TokenBytes
from millpond.models.load import load_tokenizer
from tests.helpers.examples import examples

CORPUS = ["the mill turns, the pond is still ", "Mühle am Teich — 水車は回る 🙂🙃 👩‍👩‍👧", "a  b   c\n\n\tx = 1;"] * 8
KINDS = ["byte-level", "byte-fallback", "metaspace", "wordpiece", "words"]


@cache
def tokenizer_of(kind: str) -> Any:
    """A small tokenizer of each kind; those of bytes spell any text."""
    if kind == "words":
        return load_tokenizer("pond-recall")
    if kind == "byte-level":  # GPT-2, Llama 3, Qwen
        made = Tokenizer(models.BPE())
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(
            vocab_size=330, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
        )
    elif kind == "byte-fallback":  # Llama 2, Mistral, Gemma
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcmilthe", "▁a", "▁m", "él"]
        made = Tokenizer(
            models.BPE(
                {t: i for i, t in enumerate(tokens)}, [("▁", "a"), ("▁", "m")], byte_fallback=True, unk_token="<unk>"
            )
        )
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    elif kind == "metaspace":  # T5 and other unigram models
        made = Tokenizer(models.Unigram())
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=120, special_tokens=["<s>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
        )
    else:
        made = Tokenizer(models.WordPiece(unk_token="<unk>"))  # type: ignore[call-arg]
        made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)
        trainer = trainers.WordPieceTrainer(
            vocab_size=120, special_tokens=["<s>", "</s>", "<unk>"], show_progress=False
        )
    made.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


def whole(tokenizer: Any, tokens: Sequence[int], skip: bool = True) -> str:
    """As transformers decodes; it replaces all bytes beside a broken one, and keeps none of their characters."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=skip, clean_up_tokenization_spaces=False))


def pieces(tokenizer: Any, tokens: Sequence[int], skip: bool = True) -> list[str]:
    text = IncrementalDetokenizer(tokenizer, skip)
    return [*(text.add(token) for token in tokens), text.finish()]


@pytest.mark.parametrize("kind", KINDS[:2])
@given(text=st.text(max_size=40))
@example("€€€🙂ab€")
@example("\ufffd\ufffd\ufffd\ufffd\ufffd x \ufffd")
@example("  a  a")
def test_any_unicode(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(pieces(tokenizer, tokens)) == whole(tokenizer, tokens)
    if kind == "byte-level":
        assert whole(tokenizer, tokens) == text


@pytest.mark.covering
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
def test_any_tokens(kind: str, skip: bool, data: st.DataObject) -> None:
    """Whatever the model says, special tokens and broken bytes among it."""
    tokenizer = tokenizer_of(kind)
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=80))
    streamed = "".join(pieces(tokenizer, tokens, skip))
    assert streamed == TokenBytes(tokenizer).text(tokens, skip)
    if kind != "byte-fallback":
        assert streamed == whole(tokenizer, tokens, skip)


def mixed(tokenizer: Any) -> st.SearchStrategy[list[int]]:
    """Characters in many tokens, halves of them, single bytes, blanks and whole tokens."""
    spelled = [
        tokenizer.encode(c, add_special_tokens=False) for c in ("é", "€", "🙂", "👍🏽", "\n", " ", "水", "a", " a")
    ]
    cut = [ids[:n] for ids in spelled for n in range(1, len(ids) + 1)]
    byte = [tokenizer.encode(c, add_special_tokens=False)[-1:] for c in "ĀÿĿ߿"]
    one = st.integers(0, len(tokenizer) - 1).map(lambda token: [token])
    parts = st.lists(st.one_of(st.sampled_from(spelled), st.sampled_from(cut + byte), one), max_size=30)
    return parts.map(lambda found: [token for part in found for token in part])


@pytest.mark.parametrize("kind", KINDS[:2])
@settings(max_examples=examples(150))
@given(data=st.data())
def test_streamed_whole_and_decoded_texts_agree(kind: str, data: st.DataObject) -> None:
    """And each is what the tokens' own bytes are in UTF-8, a replacement character for each piece of a broken one."""
    tokenizer = tokenizer_of(kind)
    known = TokenBytes(tokenizer)
    tokens = data.draw(mixed(tokenizer))
    text = known.text(tokens, True)
    assert "".join(pieces(tokenizer, tokens)) == text
    own = b"".join(known.of(token) for token in tokens if token not in known.special)
    if kind == "byte-level":
        assert text == whole(tokenizer, tokens) == own.decode("utf-8", "replace")
        return
    wanted = own.decode("utf-8", "surrogateescape")  # each broken byte is one of these
    wanted = "".join("\ufffd" if "\udc80" <= c <= "\udcff" else c for c in wanted)
    assert text == wanted.removeprefix(" ")
    runs_are_whole = "\ufffd" not in text
    if runs_are_whole:
        assert text == whole(tokenizer, tokens)


@pytest.mark.parametrize("kind", KINDS[:2])
@settings(max_examples=examples(150))
@given(data=st.data())
def test_a_stop_text_ends_the_text_where_it_is_whole(kind: str, data: st.DataObject) -> None:
    """Those that begin and end in characters of several tokens, and a replacement character, among them."""
    tokenizer = tokenizer_of(kind)
    tokens = data.draw(mixed(tokenizer))
    text = TokenBytes(tokenizer).text(tokens, True)
    drawn = data.draw(st.tuples(st.integers(0, len(text)), st.integers(1, 3)))
    stops = tuple({text[drawn[0] : sum(drawn)] or "€", "\ufffd", "👍🏽"})
    writer, n_read = Writer(tokenizer, SamplingParams(stop=stops)), 0
    for token in tokens:
        n_read += 1
        if writer.add(token)[1] is not None:
            break
    writer.finish()
    found = first_stop(text, stops)
    if found is None:
        assert (writer.stopped, writer.text) == (None, text)
        return
    end, stop = found
    assert (writer.stopped, writer.text) == (stop, text[: end - len(stop)])
    if "\ufffd" not in text[:end] and n_read < len(tokens):  # no token is read behind the one that completes it
        assert stop not in TokenBytes(tokenizer).text(tokens[: n_read - 1], True)


@pytest.mark.parametrize("kind", ["byte-level", "metaspace", "wordpiece", "words"])
@given(data=st.data())
def test_no_piece_is_taken_back(kind: str, data: st.DataObject) -> None:
    """What is out stays true whatever comes, and only unclear bytes are kept waiting."""
    tokenizer, out = tokenizer_of(kind), ""
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=60))
    text = IncrementalDetokenizer(tokenizer, True)
    for i, token in enumerate(tokens):
        out += text.add(token)
        now = whole(tokenizer, tokens[: i + 1])
        assert now.startswith(out)
        assert out == now or now.endswith("\ufffd")


@pytest.mark.parametrize("kind", ["byte-level", "metaspace", "wordpiece"])
def test_some_special_tokens_may_stay_in_the_text(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    words = tokenizer.encode("a b", add_special_tokens=False)
    text = IncrementalDetokenizer(tokenizer, True, (end,))
    made = "".join([*(text.add(token) for token in [begin, *words, end, begin, *words]), text.finish()])
    assert tokenizer.eos_token in made
    assert tokenizer.bos_token not in made
    assert made.count("b") == whole(tokenizer, words * 2).count("b")


@settings(max_examples=examples(40))
@given(n=st.integers(0, 80), rest=st.lists(st.integers(0, 255), max_size=8))
def test_broken_bytes_without_end_come_out(n: int, rest: list[int]) -> None:
    tokenizer = tokenizer_of("byte-level")
    lead, tail = (tokenizer.encode(c, add_special_tokens=False) for c in "éß")
    tokens = lead[:1] * n + tail + rest
    found = pieces(tokenizer, tokens)
    assert "".join(found) == whole(tokenizer, tokens)
    assert len(found[-1]) <= MAX_TOKENS + 1


def test_broken_bytes_leave_the_characters_beside_them() -> None:
    """An end of a line among them, which transformers replaces, too; stop texts are found."""
    tokenizer = tokenizer_of("byte-fallback")
    tokens = tokenizer.convert_tokens_to_ids(["<0xE2>", "<0x82>", "<0xAC>", "<0xFF>", "<0x0A>", "▁a"])
    assert whole(tokenizer, tokens) == "\ufffd" * 5 + " a"
    assert pieces(tokenizer, tokens) == ["", "", "€", "", "\ufffd\n", " a", ""]
    writer = Writer(tokenizer, SamplingParams(stop=("\n",)))
    assert [writer.add(token)[1] for token in tokens[:5]] == [None] * 4 + ["\n"]
    assert writer.text == "€\ufffd"


@pytest.mark.parametrize("first", [["<0x20>"], ["<0x20>", "<0x20>"], ["<0x20>", "▁a"], ["▁a"], ["<s>", "<0x20>"], []])
@pytest.mark.parametrize("rest", [["<0xFF>", "▁a"], ["<0x41>", "<0xFF>"], ["▁a", "<0xFF>", "▁", "▁a"]])
def test_a_blank_that_begins_a_text_is_dropped_once(first: list[str], rest: list[str]) -> None:
    """As transformers drops it, also where a broken byte follows."""
    tokenizer = tokenizer_of("byte-fallback")
    known, tokens = TokenBytes(tokenizer), tokenizer.convert_tokens_to_ids(first + rest)
    own = b"".join(known.of(token) for token in tokens if token not in known.special)
    wanted = own.decode("utf-8", "replace").removeprefix(" ")
    assert "".join(pieces(tokenizer, tokens)) == known.text(tokens, True) == wanted


@pytest.mark.parametrize("kind", KINDS[:2])
def test_tokens_have_bytes_of_their_own(kind: str) -> None:
    """Of characters in several tokens their parts, of pieces their blank, of special tokens their text."""
    tokenizer = tokenizer_of(kind)
    known = TokenBytes(tokenizer)
    for text in ("€", "🙂 é", "the mill 水車は", "a\n\nm"):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        blank = " " if kind == "byte-fallback" else ""  # the tokenizer's own, which the text is without
        assert b"".join(map(known.of, tokens)).decode() == blank + text
    assert known.of(tokenizer.eos_token_id) == b"</s>"
    assert known.of(tokenizer.encode("Ā", add_special_tokens=False)[-1]) == b"\x80"
    assert known.of(len(tokenizer) + 5) == b""
    if kind == "byte-fallback":
        assert [known.of(i) for i in tokenizer.convert_tokens_to_ids(["▁a", "▁", "él"])] == [b" a", b" ", "él".encode()]


def test_characters_come_when_they_are_complete() -> None:
    tokenizer = tokenizer_of("byte-fallback")
    tokens = tokenizer.convert_tokens_to_ids(["<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "▁a", "<s>", "▁a"])
    assert pieces(tokenizer, tokens) == ["", "", "", "🙂", " a", "", " a", ""]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("token", [0, 2, 100, "bytes"])
def test_the_cost_of_a_token_has_a_bound(kind: str, token: int | str) -> None:
    """Endless special tokens, endless broken bytes: never more than a window is decoded."""
    tokenizer = tokenizer_of(kind)
    if token == "bytes":
        token = tokenizer.encode("é", add_special_tokens=False)[0]

    class Watched:
        all_special_ids = tokenizer.all_special_ids
        longest = 0

        def decode(self, tokens: list[int], **options: Any) -> str:
            self.longest = max(self.longest, len(tokens))
            return str(tokenizer.decode(tokens, **options))

    watched = Watched()
    pieces(watched, [int(token)] * 300, skip=False)
    assert watched.longest <= 2 * MAX_TOKENS + 1


class Letters:
    """A tokenizer whose tokens are given texts."""

    all_special_ids: tuple[int, ...] = ()

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(self.texts[token] for token in tokens)


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the first stop text to be complete ends, and which it is: the longest of them."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    return (min(ends)[0], min(ends)[2]) if ends else None


@settings(max_examples=examples(300))
@given(
    texts=st.lists(st.text("ab", max_size=5), max_size=12),
    include=st.booleans(),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), max_size=4, unique=True),
)
def test_stop_texts_however_the_text_is_cut(texts: list[str], stops: list[str], include: bool) -> None:
    writer = Writer(Letters(texts), SamplingParams(stop=tuple(stops), include_stop=include))
    full, found, parts = "".join(texts), first_stop("".join(texts), stops), []
    stopped = None
    for token in range(len(texts)):
        assert stopped is None
        new, stopped = writer.add(token)
        parts.append(new)
        so_far = "".join(texts[: token + 1])
        if stopped:
            break
        held = len(so_far) - len("".join(parts))
        assert held == max((n for s in stops for n in range(len(s)) if so_far.endswith(s[:n])), default=0)
    parts.append(writer.finish())
    assert writer.text == "".join(parts)
    if found is None:
        assert stopped is None
        assert writer.text == full
    else:
        end, stop = found
        assert stopped == stop
        assert writer.text == full[: end if include else end - len(stop)]


def test_a_stop_text_across_tokens_of_half_characters() -> None:
    tokenizer = tokenizer_of("byte-fallback")
    tokens = tokenizer.convert_tokens_to_ids(["a", "<0xE2>", "<0x82>", "<0xAC>", "▁a", "b"])
    writer = Writer(tokenizer, SamplingParams(stop=("€ a",)))
    assert [writer.add(token) for token in tokens[:-1]] == [("a", None), *[("", None)] * 3, ("", "€ a")]
    assert writer.finish() == ""
    assert writer.text == "a"


def test_what_was_held_back_comes_at_the_end() -> None:
    writer = Writer(Letters(["on", "e EN"]), SamplingParams(stop=("END",)))
    assert (writer.add(0), writer.add(1)) == (("on", None), ("e ", None))
    assert writer.finish() == "EN"
    assert writer.text == "one EN"
