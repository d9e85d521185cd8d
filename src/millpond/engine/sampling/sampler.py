"""Choice of the next token of every completion in a batch, from one row of logits each.

It knows nothing of sequences, pages or order: its state hangs on keys, so a completion may leave the batch for a while
and come back.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from millpond.engine.grammar.compiler import Constraints, Grammar, Grammars
from millpond.engine.sampling.banned_tokens import Bans, Forbidden
from millpond.engine.sampling.params import SamplingParams
from millpond.engine.sampling.token_choice import Penalties, TokenChoice, choose, draw_key, score_tokens
from millpond.errors import MillpondError, NumericsError, OptionError
from millpond.kernels.decoder_ops import largest


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token chosen for a completion.

    Attributes:
        logprob: of the token as the model gave it, before penalties and temperature; None if not requested.
        top: (token id, log probability) of the likeliest tokens, the likeliest first, as many as requested.
        error: why the completion cannot go on behind it; None: it can.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    error: Exception | None = None


class BadLogitsError(NumericsError):
    """Some completions' logits hold NaN, or leave no token to choose; nothing was chosen for any.

    Attributes:
        reasons: key of each of those completions -> why, in words that name no other. The others can be sampled by
            another call without them.
    """

    def __init__(self, reasons: Mapping[Hashable, MillpondError]) -> None:
        self.reasons = dict(reasons)
        super().__init__("; ".join(dict.fromkeys(str(reason) for reason in self.reasons.values())))

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """Those completions."""
        return tuple(self.reasons)


_NAN = NumericsError("no token can be chosen: the logits hold NaN; a wider dtype may help")


@dataclass(slots=True)
class _State:
    params: SamplingParams
    seed: int
    index: int
    step: int = 0
    known: Sequence[int] = ()


class Sampler:
    """Chooses tokens for an engine's completions, each by its own parameters.

    A draw takes one random number per token, which depends on the completion's seed, its index, its step and the
    token's id alone. So the same seed gives the same tokens whatever else is in the batch, and logits that differ
    little, as those of a cache that evicts, mostly draw the same token.

    Args:
        tokenizer: needed for answers that follow a grammar, and for bad words. ends: ids that end a text; none: the
            tokenizer's own.

    Attributes:
        grammars: what answers can be made to follow.
    """

    def __init__(self, tokenizer: Any = None, ends: Collection[int] = ()) -> None:
        self._states: dict[Hashable, _State] = {}
        self._penalties = Penalties()
        self._constraints = Constraints()
        self._forbidden = Forbidden()
        self._tokenizer = tokenizer
        self.grammars = Grammars(tokenizer, ends)

    def check(self, params: SamplingParams, vocab_size: int) -> None:
        """Refuse what only the model can tell is wrong; safe to call while another thread samples.

        Raises:
            OptionError: a token id outside the vocabulary.
        """
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            ids = getattr(params, name) or ()
            wrong = [token for token in ids if not 0 <= token < vocab_size]
            if wrong:
                raise OptionError(f"{name} names token {wrong[0]}; the model's tokens are 0 to {vocab_size - 1}")

    def bans_of(self, params: SamplingParams) -> Bans | None:
        """The tokens that `params` forbid; None: none.

        Raises:
            OptionError: see `Bans.of`.
        """
        return Bans.of(params, self._tokenizer, self.grammars.ends)

    def start(
        self,
        key: Hashable,
        params: SamplingParams,
        prompt: Sequence[int],
        index: int = 0,
        grammar: Grammar | None = None,
        bans: Bans | None = None,
        *,
        seed: int | None = None,
        said: Sequence[int] = (),
        known: Sequence[int] = (),
    ) -> None:
        """A completion begins, or continues.

        Args:
            key: what it is called until `stop`. prompt: its token ids, for the repetition penalty.
            index: which of the request's `n` completions it is: each draws its own numbers from the one seed.
            grammar: what `grammars` made of `params`. bans: what `bans_of` made of them.
            seed: of its draws; None: that of `params`, or a new one where it has none.
            said: tokens that it has already. known: those that come next, whatever the logits say.

        Raises:
            OptionError: tokens that do not follow the grammar.
        """
        assert key not in self._states, f"{key} has begun already"
        assert (grammar is None) == (params.constrained is None), "the grammar of these parameters"
        tokens = (*said, *known)
        if grammar is not None:
            ends = self.grammars.ends.union(params.stop_token_ids)
            if tokens and not self._constraints.allow(grammar, ends, tokens):
                raise OptionError(f"the known tokens of answer {index} do not follow its {params.constrained}")
            self._constraints.start(key, grammar, ends)
        if bans is not None:
            self._forbidden.start(key, bans)
        self._penalties.start(key, params, prompt)
        if seed is None:
            seed = secrets.randbits(64) if params.seed is None else params.seed
        self._states[key] = _State(params, seed, index, known=tokens)
        for token in said:
            for error in self._follow([key], [token]).values():
                raise error

    def seed_of(self, key: Hashable) -> int:
        """The number that a completion's draws depend on."""
        return self._states[key].seed

    def known_of(self, key: Hashable) -> tuple[int, ...]:
        """Known tokens that a completion has not come to yet."""
        state = self._states[key]
        return tuple(state.known[state.step :])

    def stop(self, key: Hashable) -> None:
        """It is over: forget it. A key that never began is nothing to forget."""
        self._states.pop(key, None)
        self._penalties.stop(key)
        self._constraints.stop(key)
        self._forbidden.stop(key)

    def __len__(self) -> int:
        """Completions that have begun and not ended."""
        return len(self._states)

    @torch.inference_mode()
    def __call__(self, keys: Sequence[Hashable], logits: Tensor) -> list[Sampled]:
        """The next token of each completion; `logits` (S, V), any float dtype, one row per key, are left as they are.

        Raises:
            BadLogitsError: a row has no finite maximum. Nothing has changed; call again without those keys.
            Exception: the same holds for whatever else is raised.
        """
        assert len(keys) == len(logits), f"{len(keys)} keys, {len(logits)} rows of logits"
        if not keys:
            return []
        states = [self._states[key] for key in keys]
        best, tokens = largest(logits)
        bad = dict.fromkeys(_without_choice(keys, best), _NAN)
        changed = [i for i, (key, state) in enumerate(zip(keys, states, strict=True)) if self._changes(key, state)]
        if changed:
            at = torch.tensor(changed, device=logits.device)
            some = (logits[at] if len(changed) < len(states) else logits.clone()).float()
            tokens[at] = self._choose([keys[i] for i in changed], [states[i] for i in changed], some, tokens[at], bad)
        elif bad:
            raise BadLogitsError(bad)
        ids: list[int] = tokens.tolist()
        for i, state in enumerate(states):
            if state.step < len(state.known):
                ids[i] = state.known[state.step]
        sampled = self._with_logprobs(states, logits, ids)
        for key, error in self._follow(keys, ids).items():
            place = keys.index(key)
            sampled[place] = replace(sampled[place], error=error)
        return sampled

    def _follow(self, keys: Sequence[Hashable], ids: Sequence[int]) -> dict[Hashable, Exception]:
        """Take note of the next token of each completion; returns those of which that failed, and with what."""
        self._penalties.count(keys, ids)
        failed = self._constraints.advance(keys, ids)
        self._forbidden.count(keys, ids)
        for key in keys:
            self._states[key].step += 1
        return failed

    def _changes(self, key: Hashable, state: _State) -> bool:
        """Whether the likeliest token as the model gave it may not be the one; a known one is not chosen."""
        chosen = state.step >= len(state.known)
        return chosen and (state.params.temperature > 0 or self._changed(key))

    def _changed(self, key: Hashable) -> bool:
        """Whether its logits are not those of the model."""
        return key in self._penalties or key in self._constraints or key in self._forbidden

    def _choose(
        self,
        keys: Sequence[Hashable],
        states: Sequence[_State],
        logits: Tensor,
        tokens: Tensor,
        bad: Mapping[Hashable, MillpondError],
    ) -> Tensor:
        """Token ids (R,) by penalties, constraints and draws; `logits` (R, V) may be written.

        `tokens` are the likeliest before all that; `bad` are keys without a choice, of these rows or others.
        """
        if any(map(self._changed, keys)):
            self._penalties.apply_(keys, logits)
            self._constraints.apply_(keys, logits)
            self._forbidden.apply_(keys, logits)
            best, tokens = largest(logits)
            left = [key for key in _without_choice(keys, best) if key not in bad]
            bad = dict(bad) | {key: self._why(key, states[keys.index(key)]) for key in left}
        if bad:
            raise BadLogitsError(bad)
        drawn = [i for i, state in enumerate(states) if state.params.temperature > 0]
        if drawn:
            at = torch.tensor(drawn, device=logits.device)
            rows = logits[at] if len(drawn) < len(states) else logits
            tokens[at] = choose(rows, _choice([states[i] for i in drawn], logits.device))
        return tokens

    def _why(self, key: Hashable, state: _State) -> MillpondError:
        """Why nothing is left to choose from."""
        params = state.params
        given = " and ".join(params.forbids) if key in self._forbidden else ""
        if key in self._constraints:
            among = f" within {given}" if given else ""
            return OptionError(
                f"after {state.step} tokens no token of the vocabulary goes on as the {params.constrained} wants{among}"
            )
        return OptionError(f"after {state.step} tokens {given} leave no token to choose") if given else _NAN

    @staticmethod
    def _with_logprobs(states: Sequence[_State], logits: Tensor, ids: list[int]) -> list[Sampled]:
        sampled = [Sampled(token) for token in ids]
        asked = [i for i, state in enumerate(states) if state.params.logprobs is not None]
        if asked:
            rows = logits if len(asked) == len(states) else logits[torch.tensor(asked, device=logits.device)]
            top = [states[i].params.logprobs or 0 for i in asked]
            for i, (value, likeliest) in zip(asked, score_tokens(rows, [ids[i] for i in asked], top), strict=True):
                sampled[i] = Sampled(ids[i], value, likeliest)
        return sampled


def _without_choice(keys: Sequence[Hashable], best: Tensor) -> list[Hashable]:
    """The keys whose likeliest token has no finite logit (S,)."""
    return [key for key, value in zip(keys, best.tolist(), strict=True) if not math.isfinite(value)]


def _choice(states: Iterable[_State], device: torch.device) -> TokenChoice:
    """The parameters of the rows as tensors, with the key of this step's draw."""
    rows = [
        (
            s.params.temperature,
            s.params.top_k,
            s.params.top_p,
            s.params.min_p,
            s.params.typical_p,
            draw_key(s.seed, s.index, s.step),
        )
        for s in states
    ]
    temperature, top_k, top_p, min_p, typical_p, keys = zip(*rows, strict=True)
    return TokenChoice(
        torch.tensor(temperature, dtype=torch.float32, device=device),
        torch.tensor(top_k, dtype=torch.long, device=device),
        torch.tensor(top_p, dtype=torch.float64, device=device),
        torch.tensor(min_p, dtype=torch.float32, device=device),
        torch.tensor(typical_p, dtype=torch.float64, device=device),
        torch.tensor(keys, dtype=torch.long, device=device),
    )
