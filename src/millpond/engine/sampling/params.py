"""SamplingParams: token choice and stopping of one request."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from millpond.errors import OptionError

#: Limits of completions of one prompt, and of alternatives with log probabilities.
MAX_N, MAX_LOGPROBS = 128, 20
#: Limits of bad words, and of characters of one: every step compares the token sequences of each.
MAX_BAD_WORDS, MAX_BAD_WORD = 1_000, 100
#: Limit of allowed ids, more than vocabularies have.
MAX_ALLOWED = 2**20
#: Fields that constrain an answer.
CONSTRAINTS = ("json_schema", "regex", "choice", "grammar", "structural_tag")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Token choice and stopping of one request.

    Attributes:
        max_tokens: Limit of new tokens; None: up to the end of the model's context.
        min_tokens: New tokens before which no token that ends the answer is chosen; stop texts are searched for in
            the text after them.
        temperature: Divisor of the logits; 0 takes the likeliest token.
        top_p: Sample from the likeliest tokens of this total probability; 1.0 disables it.
        top_k: Sample from the k likeliest tokens; 0 disables it. The filters apply in the order top_k, top_p, min_p,
            typical_p.
        min_p: Sample from tokens of at least this share of the highest probability; 0.0 disables it.
        typical_p: Sample from the tokens of this total probability whose surprise is nearest to the expected one
            (Meister et al. 2022, sec. 4); 1.0 disables it.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or answer (CTRL,
            Keskar et al. 2019).
        presence_penalty: Subtracted once for tokens of the answer.
        frequency_penalty: Subtracted once per occurrence for tokens of the answer.
        logit_bias: Token id -> number added to its logit.
        bad_words: Texts whose tokens are never completed in the answer, with and without a space before them.
        allowed_token_ids: The only ids that are chosen, those that end the answer among them; None: all. Constraints
            hold at the same time; where no token is left the answer ends with an error.
        logprobs: Number of the likeliest tokens reported with each new token, in addition to itself; None: none. They
            are the model's own: before penalties, biases, temperature, constraints and forbidden tokens.
        prompt_logprobs: The same for the tokens of the prompt.
        stop: Texts that end the answer.
        stop_token_ids: Ids that end the answer.
        include_stop: Keep the stop text in the answer.
        ignore_eos: Continue after the model's own end.
        n: Completions of the prompt, each with a seed derived from `seed`.
        seed: The same seed gives the same tokens whatever else runs; None: a new one each time.
        json_schema: Schema that the answer follows (extra `constrained`). At most one of the five constraints may be
            given; one that cannot be enforced is refused.
        regex: Regular expression for the whole answer.
        choice: Texts of which the answer is one.
        grammar: Grammar of the answer in EBNF; its first rule is `root`.
        structural_tag: Format of the answer as a structural tag of xgrammar.
        skip_special_tokens: Leave special tokens out of the text.
        kept_special_tokens: Ids that stay in the text nevertheless.

    Raises:
        OptionError: a value out of its range.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    n: int = 1
    seed: int | None = None
    json_schema: Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    structural_tag: Mapping[str, Any] | None = None
    skip_special_tokens: bool = True
    kept_special_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            self._within("max_tokens", self.max_tokens, 1, math.inf)
        self._within("temperature", self.temperature, 0, 100)
        self._within("top_p", self.top_p, 0, 1)
        self._within("top_k", self.top_k, 0, math.inf)
        self._within("min_p", self.min_p, 0, 1)
        self._within("typical_p", self.typical_p, 0, 1)
        self._within("repetition_penalty", self.repetition_penalty, 0.01, 100)
        self._within("presence_penalty", self.presence_penalty, -2, 2)
        self._within("frequency_penalty", self.frequency_penalty, -2, 2)
        self._within("n", self.n, 1, MAX_N)
        for name in ("top_p", "typical_p"):
            if getattr(self, name) == 0:
                raise OptionError(f"{name}=0 leaves no token to choose from; use temperature=0 for the likeliest")
        self._within("min_tokens", self.min_tokens, 0, math.inf)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise OptionError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; lower it")
        self._check_forbidden()
        for name in ("logprobs", "prompt_logprobs"):
            num_alternatives = getattr(self, name)
            if num_alternatives is not None:
                self._within(name, num_alternatives, 0, MAX_LOGPROBS)
        if any(not text for text in self.stop):
            raise OptionError("stop holds an empty text, which would end every answer at once")
        for token, bias in self.logit_bias.items():
            self._within(f"logit_bias of token {token}", bias, -100, 100)
        constraints = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(constraints) > 1:
            raise OptionError(
                f"{constraints[0]} and {constraints[1]}: an answer can follow one of them; leave the other out"
            )
        if constraints and self.ignore_eos:
            raise OptionError(f"{constraints[0]} ends the answer where it is complete; leave ignore_eos out")
        for name in ("json_schema", "structural_tag"):
            try:
                json.dumps(getattr(self, name), allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise OptionError(f"{name} is not JSON: {error}") from None
        if self.choice is not None and not any(self.choice):
            raise OptionError("choice holds no text to choose; give at least one that is not empty")

    def _check_forbidden(self) -> None:
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise OptionError(f"bad_words has {len(self.bad_words):,} texts and may have {MAX_BAD_WORDS:,}")
        for word in self.bad_words:
            if not word.strip():
                raise OptionError(f"bad_words holds {word[:20]!r}, which is no word; leave it out")
            if len(word) > MAX_BAD_WORD:
                raise OptionError(
                    f"bad_words holds {word[:20]!r}... of {len(word):,} characters; a word may have {MAX_BAD_WORD}"
                )
        allowed = self.allowed_token_ids
        if allowed is not None and not 0 < len(allowed) <= MAX_ALLOWED:
            raise OptionError(
                f"allowed_token_ids has {len(allowed):,} ids: must have 1 to {MAX_ALLOWED:,}, or be None for all"
            )

    @property
    def constrained(self) -> str | None:
        """Field that constrains the answer; None: there is none."""
        return next((name for name in CONSTRAINTS if getattr(self, name) is not None), None)

    @property
    def forbids(self) -> tuple[str, ...]:
        """Fields that forbid tokens by name."""
        return tuple(name for name in ("min_tokens", "bad_words", "allowed_token_ids") if getattr(self, name))

    @staticmethod
    def _within(name: str, value: float, min_value: float, max_value: float) -> None:
        if not (isinstance(value, int | float) and min_value <= value <= max_value):  # NaN is within nothing
            upper_text = "" if math.isinf(max_value) else f" and at most {max_value:g}"
            raise OptionError(f"{name}={value}: must be at least {min_value:g}{upper_text}")
