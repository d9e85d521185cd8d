"""Grammars of answers: checked, compiled in another process under limits, cached, and followed token by token."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from millpond.engine.grammar.patterns import check_grammar, check_pattern
from millpond.engine.grammar.process import WORKER, Ask, GrammarProcess
from millpond.engine.grammar.schema import MAX_BYTES, enforceable
from millpond.engine.sampling.params import SamplingParams
from millpond.errors import OptionError
from millpond.kernels.transfers import on_device
from millpond.option_ranges import brief
from millpond.optional import require

#: Most blanks in a row between two parts of a JSON value: a model may indent, but not for ever.
MAX_BLANKS = 32
#: Most characters of a grammar in EBNF, and most texts and characters of a choice.
MAX_GRAMMAR, MAX_CHOICES, MAX_CHOICE_TEXT = 64 * 1024, 1_000, 128 * 1024
#: Control characters that stay in answers of JSON, and in those of text with JSON in it; kinds of tags that hold text.
_JSON, _TEXT = b"\r\n", b"\t\r\n"
_FREE = ("any_text", "triggered_tags", "dispatch", "regex", "grammar", "const_string")
#: Bytes of compiled grammars that are kept, and grammars that are compiled at a time.
KEPT_BYTES, AT_ONCE = 64 << 20, 4
#: Refusals that are remembered, and for how many seconds: a refusal may take all that a grammar may take.
KEPT_REFUSALS, REFUSED_S = 256, 300.0
#: Most repetitions, characters and tokens that a structural tag may request by number, and the keys that do.
MAX_COUNT, COUNTS = 10_000, frozenset({"min", "max", "max_chars", "max_tokens"})


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar.

    Attributes:
        compiled: Grammar of xgrammar.
        vocab_size: Tokens that it knows.
        lawful: One bit per token, 32 to an int32, 0 for those that may not come whatever the grammar says; None: all
            may.
    """

    compiled: Any
    vocab_size: int
    lawful: Tensor | None


class Grammars:
    """Compiled grammars of the requests to one model; safe to use from any thread.

    Args:
        tokenizer: Tokenizer of the model, or None.
        ends: Ids that end a text; those of the tokenizer if there are none.
        worker: Process that compiles.
    """

    def __init__(self, tokenizer: Any, ends: Collection[int] = (), worker: GrammarProcess = WORKER) -> None:
        self._tokenizer = tokenizer
        tokenizer_end = getattr(tokenizer, "eos_token_id", None)
        self.ends = frozenset(ends) or frozenset(() if tokenizer_end is None else (tokenizer_end,))
        self._worker = worker
        self._lock = threading.Lock()
        self._tokenizer_info: Any = None
        self._tokenizer_json = self._name = ""
        self._lawful: dict[bytes | None, Tensor] = {}
        self._cached: OrderedDict[str, tuple[Grammar, int]] = OrderedDict()
        self._refused: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._threads: ThreadPoolExecutor | None = None

    def of(self, params: SamplingParams, ask: Ask | None = None) -> Grammar | None:
        """Return the grammar that an answer must follow; None: there is none.

        Compiling takes time, unless the grammar is cached.

        Args:
            params: Parameters of the request.
            ask: Handle by which another thread may cancel it.

        Raises:
            OptionError: xgrammar is not installed, there is no tokenizer, or no answer can follow it within the limits.
        """
        name = params.constrained
        if name is None:
            return None
        xgrammar = _xgrammar(name)
        if self._tokenizer is None or not self.ends:
            raise OptionError(f"{name} needs a tokenizer with an end-of-text token; this engine has none")
        spec = _spec(name, getattr(params, name))
        key = hashlib.sha256(json.dumps(spec).encode()).hexdigest()
        with self._lock:
            if key in self._cached:
                self._cached.move_to_end(key)
                return self._cached[key][0]
            reason, until = self._refused.get(key, ("", 0.0))
            if time.monotonic() < until:
                raise OptionError(reason)
            self._learn(xgrammar)
        try:
            serialized = self._worker.compile(spec, self._name, self._tokenizer_json, ask)
            compiled = xgrammar.CompiledGrammar.deserialize_json(serialized, self._tokenizer_info)
        except OptionError as error:
            reason = f"{name} cannot be followed: {error}"
            self._remember_refusal(key, reason)
            raise OptionError(reason) from None
        grammar = Grammar(compiled, self._tokenizer_info.vocab_size, self._lawful.get(_apart_from_json(name, params)))
        self._keep(key, grammar, compiled.memory_size_bytes)
        return grammar

    async def wait_for(self, params: SamplingParams) -> Grammar | None:
        """Return the grammar of `of` from another thread; cancelling the task cancels it."""
        if params.constrained is None:
            return None
        ask = Ask()
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(AT_ONCE, "grammars")
        future = self._threads.submit(self.of, params, ask)
        try:
            return await asyncio.wrap_future(future)
        finally:
            ask.give_up()  # the caller is gone, whatever the reason

    def close(self) -> None:
        """Forget all grammars."""
        with self._lock:
            threads, self._threads = self._threads, None
            self._cached.clear()
            self._refused.clear()
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)

    def _learn(self, xgrammar: Any) -> None:
        """Prepare the tokenizer's vocabulary for xgrammar."""
        if self._tokenizer_info is None:
            tokenizer_info = xgrammar.TokenizerInfo.from_huggingface(self._tokenizer, stop_token_ids=sorted(self.ends))
            self._tokenizer_json = tokenizer_info.serialize_json()
            self._lawful = {extra: _lawful(tokenizer_info.decoded_vocab, extra) for extra in (_JSON, _TEXT)}
            self._name = hashlib.sha256(self._tokenizer_json.encode()).hexdigest()
            self._tokenizer_info = tokenizer_info

    def _keep(self, key: str, grammar: Grammar, size: int) -> None:
        """Cache a grammar, and drop the least recently used ones."""
        with self._lock:
            self._cached[key] = grammar, size
            while sum(size for _, size in self._cached.values()) > KEPT_BYTES:
                self._cached.popitem(last=False)

    def _remember_refusal(self, key: str, reason: str) -> None:
        """Refuse the same for a while without another try."""
        with self._lock:
            self._refused[key] = reason, time.monotonic() + REFUSED_S
            self._refused.move_to_end(key)
            if len(self._refused) > KEPT_REFUSALS:
                self._refused.popitem(last=False)


def _spec(name: str, value: Any) -> dict[str, Any]:
    """Return the grammar to compile, as the worker takes it.

    Raises:
        OptionError: it is too large, or holds what cannot be enforced.
    """
    if name == "json_schema":
        return {"kind": name, "value": enforceable(value), "most_blanks": MAX_BLANKS}
    if name == "regex":
        check_pattern(value, "regex")
        return {"kind": name, "value": value}
    if name == "grammar":
        _check_grammar(value, name)
        return {"kind": name, "value": value}
    if name == "choice":
        length = sum(map(len, value))
        if len(value) > MAX_CHOICES or length > MAX_CHOICE_TEXT:
            raise OptionError(
                f"choice has {len(value):,} texts of {length:,} characters and may have {MAX_CHOICES:,} of "
                f"{MAX_CHOICE_TEXT:,}"
            )
        texts = [{"type": "const_string", "value": text} for text in dict.fromkeys(value)]
        return {"kind": "tag", "value": {"type": "or", "elements": texts}}
    size = len(json.dumps(value))
    if size > MAX_BYTES:
        raise OptionError(f"structural_tag has {size:,} bytes of JSON and may have {MAX_BYTES:,}")
    return {"kind": "tag", "value": _enforceable_tag(value)}


def _check_grammar(grammar: str, name: str) -> None:
    if len(grammar) > MAX_GRAMMAR:
        raise OptionError(f"{name} has {len(grammar):,} characters and may have {MAX_GRAMMAR:,}")
    check_grammar(grammar, name)


def _enforceable_tag(tag: Any) -> Any:
    """Return a structural tag with enforceable schemas, expressions, grammars and numbers."""
    if isinstance(tag, Mapping):
        for name in COUNTS & tag.keys():
            if isinstance(tag[name], int) and not 0 <= tag[name] <= MAX_COUNT:
                raise OptionError(f"structural_tag: {name}={brief(tag[name])} must be 0 to {MAX_COUNT:,}")
        if tag.get("type") == "regex" and isinstance(tag.get("pattern"), str):
            check_pattern(tag["pattern"], "structural_tag: pattern")
        if tag.get("type") == "grammar" and isinstance(tag.get("grammar"), str):
            _check_grammar(tag["grammar"], "structural_tag: grammar")
        if tag.get("type") == "qwen_xml_parameter":
            return {**tag, "json_schema": enforceable(tag.get("json_schema"))}
        if tag.get("type") == "json_schema":
            schema = enforceable(tag.get("json_schema"))
            return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_BLANKS}
        try:
            return {name: _enforceable_tag(part) for name, part in tag.items()}
        except OptionError as error:
            if tag.get("type") != "tag":
                raise
            raise OptionError(f"{error} (behind {str(tag.get('begin'))[:100]!r})") from None
    return [_enforceable_tag(part) for part in tag] if isinstance(tag, list | tuple) else tag


def _apart_from_json(name: str, params: SamplingParams) -> bytes | None:
    """Return control characters that may come where an answer holds JSON; None: any."""
    if name == "json_schema":
        return _JSON
    tag = json.dumps(params.structural_tag)
    if '"json_schema"' not in tag:
        return None
    return _TEXT if any(f'"{kind}"' in tag for kind in _FREE) else _JSON


def _lawful(vocabulary: Sequence[bytes], extra: bytes) -> Tensor:
    """Return one bit per token, 32 to an int32: 0 for those with control characters.

    JSON has these nowhere; the bytes in `extra` are allowed. xgrammar 0.2.8 lets them into strings of limited length.
    Tabs between values go with them; line ends may stay, which it keeps out of strings.
    """
    bits = np.zeros(-(-len(vocabulary) // 32) * 32, dtype=np.uint8)
    for token, text in enumerate(vocabulary):
        bits[token] = all(byte >= 0x20 or byte in extra for byte in text)
    return torch.from_numpy(np.packbits(bits, bitorder="little").view("<i4"))


def _xgrammar(name: str) -> Any:
    return require("xgrammar", "constrained", name)


@dataclass(frozen=True, slots=True)
class _Followed:
    """Position of one completion in its grammar.

    Attributes:
        matcher: Matcher of xgrammar.
        grammar: The grammar.
    """

    matcher: Any
    grammar: Grammar


class Constraints:
    """Positions of all completions that have a grammar."""

    def __init__(self) -> None:
        self._followed: dict[Hashable, _Followed] = {}

    def start(self, key: Hashable, grammar: Grammar, ends: Collection[int]) -> None:
        """Add a completion; the ids in `ends` end it, where it is complete."""
        self._followed[key] = _Followed(_matcher(grammar, ends), grammar)

    def stop(self, key: Hashable) -> None:
        """Remove a completion."""
        self._followed.pop(key, None)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._followed

    @staticmethod
    def allow(grammar: Grammar, ends: Collection[int], tokens: Sequence[int]) -> bool:
        """Return whether an answer may begin with these tokens."""
        matcher = _matcher(grammar, ends)
        return all(matcher.is_terminated() or matcher.accept_token(token) for token in tokens)

    def apply_(self, keys: Sequence[Hashable], logits: Tensor) -> None:
        """Forbid in the logits (S, V), float32, in place, all that the grammars do not allow."""
        followed = {i: self._followed[key] for i, key in enumerate(keys) if key in self._followed}
        followed = {i: position for i, position in followed.items() if not position.matcher.is_terminated()}
        if not followed:
            return
        import xgrammar

        vocab_size = next(iter(followed.values())).grammar.vocab_size  # of the one tokenizer
        mask = xgrammar.allocate_token_bitmask(len(keys), vocab_size)
        for i, position in followed.items():
            position.matcher.fill_next_token_bitmask(mask, i)
            if position.grammar.lawful is not None:
                mask[i] &= position.grammar.lawful
        rows, covered = list(followed), min(vocab_size, logits.shape[-1])
        xgrammar.apply_token_bitmask_inplace(logits, on_device(mask, logits.device), vocab_size=covered, indices=rows)
        logits[rows, covered:] = float("-inf")  # rows of the output layer without a token

    def advance(self, keys: Sequence[Hashable], tokens: Sequence[int]) -> dict[Hashable, Exception]:
        """Record the chosen tokens, one per key; return the keys whose grammar failed, and why."""
        failed: dict[Hashable, Exception] = {}
        for key, token in zip(keys, tokens, strict=True):
            position = self._followed.get(key)
            if position is None:
                continue
            try:
                if not position.matcher.is_terminated():
                    accepted = position.matcher.accept_token(token)
                    assert accepted, f"token {token} was chosen against the grammar of {key}"
            except Exception as error:
                failed[key] = error
        return failed


def _matcher(grammar: Grammar, ends: Collection[int]) -> Any:
    """Return a matcher at the beginning of an answer."""
    import xgrammar

    return xgrammar.GrammarMatcher(grammar.compiled, override_stop_tokens=sorted(ends))
