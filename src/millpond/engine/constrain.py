"""Answers that follow a JSON schema, by the library xgrammar (extra `constrained`).

After each token the grammar says which tokens may come next; the others' logits become minus infinity. When the value
is complete, only the tokens that end an answer are left.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from millpond.engine.sampling_params import SamplingParams
from millpond.errors import OptionError

#: Most blanks in a row between two parts of a value: a model may indent, but not for ever.
MOST_BLANKS = 32


class Constraints:
    """The grammars of all completions that have one; compiled once per schema."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._compiler: Any = None
        self._vocab_size = 0
        self._lawful: Tensor | None = None
        self._matchers: dict[Hashable, Any] = {}

    def check(self, params: SamplingParams) -> None:
        """Compile the schema, if there is one, so that a bad one is refused before anything runs.

        Raises:
            OptionError: xgrammar is not installed, there is no tokenizer, or the schema cannot be followed.
        """
        if params.json_schema is not None:
            self._compile(params)

    def start(self, key: Hashable, params: SamplingParams) -> None:
        """As `check`; and remember where the answer stands in its grammar."""
        if params.json_schema is not None:
            grammar = self._compile(params)
            ends = [self._tokenizer.eos_token_id, *params.stop_token_ids]
            self._matchers[key] = _xgrammar().GrammarMatcher(grammar, override_stop_tokens=ends)

    def stop(self, key: Hashable) -> None:
        """Forget it."""
        self._matchers.pop(key, None)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._matchers

    def apply_(self, keys: Sequence[Hashable], logits: Tensor) -> None:
        """Forbid in the logits (S, V), float32, in place, what the grammars do not allow."""
        rows = [i for i, key in enumerate(keys) if key in self._matchers and not self._matchers[key].is_terminated()]
        if not rows:
            return
        xgrammar = _xgrammar()
        mask = xgrammar.allocate_token_bitmask(len(keys), self._vocab_size)
        for i in rows:
            self._matchers[keys[i]].fill_next_token_bitmask(mask, i)
        mask &= self._lawful
        covered = min(self._vocab_size, logits.shape[-1])
        xgrammar.apply_token_bitmask_inplace(logits, mask.to(logits.device), vocab_size=covered, indices=rows)
        logits[rows, covered:] = float("-inf")  # rows of the output layer that stand for no token

    def advance(self, keys: Sequence[Hashable], tokens: Sequence[int]) -> None:
        """The tokens that were chosen, one per key."""
        for key, token in zip(keys, tokens, strict=True):
            matcher = self._matchers.get(key)
            if matcher is not None and not matcher.is_terminated():
                accepted = matcher.accept_token(token)
                assert accepted, f"token {token} was chosen against the grammar of {key}"

    def _compile(self, params: SamplingParams) -> Any:
        xgrammar = _xgrammar()
        if self._tokenizer is None or self._tokenizer.eos_token_id is None:
            raise OptionError("json_schema needs a tokenizer with an end-of-text token; this engine has none")
        if self._compiler is None:
            info = xgrammar.TokenizerInfo.from_huggingface(
                self._tokenizer, stop_token_ids=[self._tokenizer.eos_token_id]
            )
            self._vocab_size, self._lawful = info.vocab_size, _lawful(info.decoded_vocab)
            self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)
        try:
            return self._compiler.compile_json_schema(json.dumps(params.json_schema), max_whitespace_cnt=MOST_BLANKS)
        except Exception as error:  # xgrammar's own types are not public
            reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
            raise OptionError(f"json_schema cannot be followed: {reason}") from error


def _lawful(vocabulary: Sequence[bytes]) -> Tensor:
    """A bit per token, 32 to an int32: 0 for those with control characters, which JSON has nowhere.

    xgrammar 0.2.8 lets them into strings of limited length. Tabs between values go with them; line ends may stay, which
    it keeps out of strings.
    """
    bits = np.zeros(-(-len(vocabulary) // 32) * 32, dtype=np.uint8)
    for token, text in enumerate(vocabulary):
        bits[token] = all(byte >= 0x20 or byte in b"\r\n" for byte in text)
    return torch.from_numpy(np.packbits(bits, bitorder="little").view("<i4"))


def _xgrammar() -> Any:
    try:
        import xgrammar
    except ImportError:
        raise OptionError("json_schema needs xgrammar; install it with: pip install 'millpond[constrained]'") from None
    return xgrammar
