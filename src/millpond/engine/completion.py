"""State of one completion while it grows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from millpond.cache.coded.kept_coder import KeptCodes
from millpond.cache.coded.text import CodedText
from millpond.engine.detokenizer import Writer
from millpond.engine.outputs import Completion, FinishReason, Forgotten, KVStats, TokenLogprob
from millpond.engine.sampling.params import SamplingParams
from millpond.engine.sampling.sampler import Sampled
from millpond.engine.token_bytes import TokenBytes

_log = logging.getLogger(__name__)


class ReuseCounts(NamedTuple):
    """Tokens of a prompt that were reused or dropped, see `KVStats`.

    Reused tokens come from a chunk store or an earlier turn.
    """

    restored_tokens: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    forgotten_tokens: int = 0
    decoded_tokens: int = 0
    exact: bool = True


class CompletionState:
    """Tokens and text of one completion, and why it ended.

    Args:
        key: Its name for the sampler: request and number.
        params: Token choice and stopping.
        max_new_tokens: Most tokens that it may have.
        ends: Ids that end a text, from the model's configuration.
        tokenizer: Tokenizer; None: there is no text.

    Attributes:
        forgotten: Losses of its cache, by span of the prompt; set by the engine.
        kv: Size of its cache; set by the engine.
        shared: Tokens of its prompt that others had read; set by the engine.
        reuse: Tokens from a chunk store or an earlier turn; set by the engine.
        codes: Codes that the beginning of its cache was decoded from; None: there are none. Set by the engine.
        kept: The same where its method evicts: what later codes go on from; None: there are none. Set by the engine.
        copied: Codes of the last copy of its cache, which the next one goes on from; None: there was none. Set by the
            engine.
    """

    def __init__(
        self, key: tuple[str, int], params: SamplingParams, max_new_tokens: int, ends: frozenset[int], tokenizer: Any
    ) -> None:
        self.key = key
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.kv: KVStats | None = None
        self.forgotten: tuple[Forgotten, ...] = ()
        self.shared = 0
        self.reuse = ReuseCounts()
        self.codes: CodedText | None = None
        self.kept: KeptCodes | None = None
        self.copied: CodedText | None = None
        self._params = params
        self.max_new_tokens = max_new_tokens
        self._ends = frozenset() if params.ignore_eos else ends
        self._tokenizer = tokenizer
        self._logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self._writer = None if tokenizer is None else Writer(tokenizer, params)
        self._stop_reason: str | int | None = None
        self._n_fed = 0  # its tokens up to the newest one, which the cache reads next

    @property
    def index(self) -> int:
        """Its number among the answers of the request."""
        return self.key[1]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def newest(self) -> int:
        """The token that its cache reads next."""
        return self.tokens[self._n_fed - 1]

    @property
    def was_coded(self) -> bool:
        """Whether the beginning of its cache was decoded from codes."""
        return self.codes is not None or self.kept is not None

    @property
    def replaying(self) -> bool:
        """Whether it has tokens that its cache, which began again, has not read yet."""
        return self._n_fed < len(self.tokens)

    def begin_again(self) -> None:
        """Start again with an empty cache, which reads the prompt and then the tokens it has."""
        self._n_fed, self.shared, self.reuse = 0, 0, ReuseCounts()
        self.codes = self.kept = self.copied = None

    def decoded_from(self, codes: CodedText | KeptCodes, n_tokens: int) -> None:
        """Record that its cache, with so many tokens of its prompt, was decoded."""
        if isinstance(codes, CodedText):
            self.codes = codes
        else:
            self.kept = codes
        self.reuse = self.reuse._replace(decoded_tokens=n_tokens, exact=False)

    def replay(self) -> None:
        """Take the next of the tokens that it already has."""
        self._n_fed += 1

    def append(self, sampled: Sampled) -> None:
        """Append the next token."""
        token = sampled.token_id
        self.tokens.append(token)
        self._n_fed += 1
        if self._logprobs is not None:
            self._logprobs.append(with_texts(self._tokenizer, token, sampled.logprob or 0.0, sampled.top))
        if token in self._ends:
            self.end("stop")
        elif token in self._params.stop_token_ids:
            self._stop_reason = token
            self._write(token, always=self._params.include_stop)
            self.end("stop")
        elif (stopped := self._write(token)) is not None:
            self._stop_reason = stopped
            self.end("stop")
        elif len(self.tokens) >= self.max_new_tokens:
            self.end("length")

    def end(self, reason: FinishReason) -> None:
        """End the completion, with the text that was held back; a stop text in it is the reason."""
        self.finish_reason = reason
        if self._writer is None:
            return
        try:
            self._writer.finish()
        except Exception as error:
            if reason != "error":
                raise
            _log.debug("no rest of the text of an answer that failed", exc_info=error)
        if self._writer.stopped is not None and reason in ("stop", "length"):
            self.finish_reason = "stop"
            self._stop_reason = self._stop_reason if self._stop_reason is not None else self._writer.stopped

    @property
    def cached(self) -> int:
        """Tokens of its prompt that were not computed for it."""
        return self.shared + self.reuse.restored_tokens + self.reuse.reused_tokens

    def count(self, figures: KVStats) -> None:
        """Record the size of its cache now, and the tokens that its prompt has from elsewhere."""
        if self.shared or self.reuse != ReuseCounts():
            figures = replace(figures, shared_tokens=self.shared, **self.reuse._asdict())
        self.kv = figures

    def to_output(self) -> Completion:
        """Return the completion so far."""
        return Completion(
            self.index,
            "" if self._writer is None else self._writer.text,
            tuple(self.tokens),
            None if self._logprobs is None else tuple(self._logprobs),
            self.finish_reason,
            self._stop_reason,
            self.kv,
            self.forgotten,
        )

    def _write(self, token: int, always: bool = True) -> str | None:
        """Add a token to the text, and return the stop text that it completes."""
        if self._writer is None or not always:
            return None
        _, stopped = self._writer.add(token)
        return stopped


def with_texts(tokenizer: Any, token: int, logprob: float, top: Sequence[tuple[int, float]]) -> TokenLogprob:
    """Return a log probability with the bytes and texts of its tokens.

    They are empty without a tokenizer.
    """
    token_bytes = None if tokenizer is None else TokenBytes(tokenizer)
    own_bytes, *top_bytes = (
        b"" if token_bytes is None else token_bytes.of(candidate)
        for candidate in (token, *(candidate for candidate, _ in top))
    )
    texts = [spelled.decode("utf-8", "replace") for spelled in top_bytes]
    likeliest = tuple((candidate, value, text) for (candidate, value), text in zip(top, texts, strict=True))
    return TokenLogprob(token, logprob, own_bytes.decode("utf-8", "replace"), likeliest, own_bytes, tuple(top_bytes))
