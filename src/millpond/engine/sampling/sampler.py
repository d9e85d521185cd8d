"""Choice of the next token of every completion in a batch, from one row of logits each.

It knows nothing of sequences, pages or order: its state is stored by key, so a completion may leave the batch for a
while and return. A step is launched without the host (`launch`) and read once (`finish`), at any later time; the tokens
of one step that was not read may be behind it.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from millpond.engine.grammar.compiler import Constraints, Grammar, Grammars
from millpond.engine.sampling.banned_tokens import Bans, Forbidden
from millpond.engine.sampling.params import SamplingParams
from millpond.engine.sampling.penalties import Penalties
from millpond.engine.sampling.token_choice import TokenChoice, choose, draw_key
from millpond.engine.sampling.token_scores import TokenScores
from millpond.errors import MillpondError, NumericsError, OptionError
from millpond.kernels.decoder_ops import largest
from millpond.kernels.transfers import ReadBack, on_device


@dataclass(frozen=True, slots=True)
class Sampled:
    """Token chosen for a completion.

    Attributes:
        token_id: Its id.
        logprob: Its log probability as the model gave it, before penalties and temperature; None if not requested.
        top: (token id, log probability) of the requested number of likeliest tokens, the likeliest first.
        error: Why the completion cannot continue after it; None: it can.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens of one step that the host has not read.

    Attributes:
        keys: Names of the completions.
        tokens: Their next tokens, (S,) int64 where the logits are; any token of the vocabulary for a row without a
            choice.
        read: On their way to the host: the tokens; which rows have a finite maximum as the model gave them, and which
            have one after all changes, (S,) bool each; and the scores of the rows `scored`, if there are any.
        scored: Rows whose log probabilities are requested, and of how many of the likeliest tokens.
    """

    keys: tuple[Hashable, ...]
    tokens: Tensor
    read: ReadBack
    scored: Mapping[int, int]


class BadLogitsError(NumericsError):
    """Logits of some completions hold NaN, or leave no token to choose; nothing was chosen.

    Args:
        reasons: See the attribute.

    Attributes:
        reasons: Key of each of those completions -> why, in words that name no other. The others can be sampled by
            another call without them.
    """

    def __init__(self, reasons: Mapping[Hashable, MillpondError]) -> None:
        self.reasons = dict(reasons)
        super().__init__("; ".join(dict.fromkeys(str(reason) for reason in self.reasons.values())))

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """Keys of those completions."""
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
        tokenizer: Needed for answers that follow a grammar, and for bad words.
        ends: Ids that end a text; those of the tokenizer if there are none.

    Attributes:
        grammars: Compiler of the rules that answers can follow.
    """

    def __init__(self, tokenizer: Any = None, ends: Collection[int] = ()) -> None:
        self._states: dict[Hashable, _State] = {}
        self._penalties = Penalties()
        self._constraints = Constraints()
        self._forbidden = Forbidden()
        self._tokenizer = tokenizer
        self.grammars = Grammars(tokenizer, ends)

    def check(self, params: SamplingParams, vocab_size: int) -> None:
        """Refuse parameters that do not fit the model; safe to call while another thread samples.

        Raises:
            OptionError: a token id outside the vocabulary.
        """
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            ids = getattr(params, name) or ()
            unknown_ids = [token for token in ids if not 0 <= token < vocab_size]
            if unknown_ids:
                raise OptionError(f"{name} names token {unknown_ids[0]}; the model's tokens are 0 to {vocab_size - 1}")

    def bans_of(self, params: SamplingParams) -> Bans | None:
        """Return the tokens that `params` forbid; None: none.

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
        decoded: Sequence[int] = (),
        known: Sequence[int] = (),
    ) -> None:
        """Add a completion that begins or continues.

        Args:
            key: Its name until `stop`.
            params: Token choice and stopping.
            prompt: Its token ids, for the repetition penalty.
            index: Number among the request's `n` completions: each draws its own numbers from the one seed.
            grammar: Result of `grammars` for `params`.
            bans: Result of `bans_of` for `params`.
            seed: Seed of its draws; None: that of `params`, or a new one where it has none.
            decoded: Tokens that it has already.
            known: Tokens that come next, whatever the logits say.

        Raises:
            OptionError: tokens that do not follow the grammar.
        """
        assert key not in self._states, f"{key} has begun already"
        assert (grammar is None) == (params.constrained is None), "the grammar of these parameters"
        tokens = (*decoded, *known)
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
        for token in decoded:
            for error in self._follow([key], [token]).values():
                raise error

    def seed_of(self, key: Hashable) -> int:
        """Return the number that a completion's draws depend on."""
        return self._states[key].seed

    def known_of(self, key: Hashable) -> tuple[int, ...]:
        """Return the known tokens that a completion has not reached yet."""
        state = self._states[key]
        return tuple(state.known[state.step :])

    def needs_host(self, key: Hashable) -> bool:
        """Return whether the next choice depends on what the host makes of the tokens."""
        state = self._states[key]
        return key in self._constraints or key in self._forbidden or state.step < len(state.known)

    def stop(self, key: Hashable) -> None:
        """Remove a completion that has ended; an unknown key is no error."""
        self._states.pop(key, None)
        self._penalties.stop(key)
        self._constraints.stop(key)
        self._forbidden.stop(key)

    def __len__(self) -> int:
        """Return the number of completions that have begun and not ended."""
        return len(self._states)

    def __call__(self, keys: Sequence[Hashable], logits: Tensor) -> list[Sampled]:
        """Return the next token of each completion.

        Args:
            keys: Names of the completions.
            logits: (S, V), any float dtype, one row per key; left unchanged.

        Raises:
            BadLogitsError: a row has no finite maximum. Nothing has changed; call again without those keys.
            Exception: the same holds for whatever else is raised.
        """
        return self.finish(self.launch(keys, logits)) if len(keys) else []

    @torch.inference_mode()
    def launch(self, keys: Sequence[Hashable], logits: Tensor, newest: Tensor | None = None) -> Drawn:
        """Launch the choice of the next token of each completion, without a wait.

        No completion changes until `finish`; a choice that is never finished leaves no trace. Masks of grammars and
        bans follow from the tokens that are finished, so that those completions take no `newest`.

        Args:
            keys: Names of the completions, at least one.
            logits: (S, V), any float dtype, one row per key; left unchanged.
            newest: Tokens (S,) int64 of a choice for these keys that is not finished yet, where the logits are; None:
                all are.
        """
        assert len(keys) == len(logits), f"{len(keys)} keys, {len(logits)} rows of logits"
        device, states = logits.device, [self._states[key] for key in keys]
        max_logits, tokens = largest(logits)
        is_finite = max_logits.isfinite()
        has_choice = is_finite
        changed = [i for i, (key, state) in enumerate(zip(keys, states, strict=True)) if self._changes(key, state)]
        if changed:
            rows = on_device(torch.tensor(changed), device)
            changed_logits = (logits[rows] if len(changed) < len(states) else logits.clone()).float()
            before = None if newest is None else newest[rows]
            chosen, has_choice_there = self._choose(
                [keys[i] for i in changed], [states[i] for i in changed], changed_logits, before
            )
            tokens[rows], has_choice = chosen, has_choice.index_put((rows,), has_choice_there)
        known = {i: state.known[state.step] for i, state in enumerate(states) if state.step < len(state.known)}
        if known:
            places, ids = on_device(torch.tensor([[*known], [*known.values()]]), device)
            tokens[places] = ids
        scored = {i: state.params.logprobs for i, state in enumerate(states) if state.params.logprobs is not None}
        scores = self._scores(logits, tokens, scored) if scored else ()
        return Drawn(tuple(keys), tokens, ReadBack([tokens, is_finite, has_choice, *scores]), scored)

    def finish(self, drawn: Drawn, keys: Collection[Hashable] | None = None) -> list[Sampled]:
        """Wait for the tokens of `launch`, and return them in its order.

        Args:
            drawn: What `launch` returned. Of several, the oldest is finished first.
            keys: Completions that take their tokens; the others are left out, and stay as they were. None: all.

        Raises:
            BadLogitsError: a row of theirs has no finite maximum. Nothing has changed; call again without those keys.
        """
        tokens, is_finite, has_choice, *scores = drawn.read.wait()
        kept = [i for i, key in enumerate(drawn.keys) if keys is None or key in keys]
        reasons: dict[Hashable, MillpondError] = {}
        for i in kept:
            if not is_finite[i]:
                reasons[drawn.keys[i]] = _NAN
            elif not has_choice[i]:
                reasons[drawn.keys[i]] = self._why(drawn.keys[i])
        if reasons:
            raise BadLogitsError(reasons)
        ids: list[int] = tokens.tolist()
        listed = TokenScores(*scores).listed([*drawn.scored.values()]) if scores else []
        scored = dict(zip(drawn.scored, listed, strict=True))
        failed = self._follow([drawn.keys[i] for i in kept], [ids[i] for i in kept])
        sampled = []
        for i in kept:
            logprob, top = scored.get(i, (None, ()))
            sampled.append(Sampled(ids[i], logprob, top, failed.get(drawn.keys[i])))
        return sampled

    def _follow(self, keys: Sequence[Hashable], ids: Sequence[int]) -> dict[Hashable, Exception]:
        """Record the next token of each completion; return the errors of those that failed."""
        self._penalties.count(keys, ids)
        failed = self._constraints.advance(keys, ids)
        self._forbidden.count(keys, ids)
        for key in keys:
            self._states[key].step += 1
        return failed

    def _changes(self, key: Hashable, state: _State) -> bool:
        """Return whether another token than the model's likeliest may be chosen.

        A known token is not chosen.
        """
        is_chosen = state.step >= len(state.known)
        return is_chosen and (state.params.temperature > 0 or self._changed(key))

    def _changed(self, key: Hashable) -> bool:
        """Return whether the logits of a completion are not those of the model."""
        return key in self._penalties or key in self._constraints or key in self._forbidden

    def _choose(
        self, keys: Sequence[Hashable], states: Sequence[_State], logits: Tensor, newest: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return token ids (R,) by penalties, constraints and draws.

        The second result says which rows have a choice, (R,) bool.

        Args:
            keys: Names of the completions.
            states: Their states.
            logits: (R, V); may be written.
            newest: See `launch`, (R,).
        """
        if any(map(self._changed, keys)):
            self._penalties.apply_(keys, logits, newest)
            self._constraints.apply_(keys, logits)
            self._forbidden.apply_(keys, logits)
        max_logits, tokens = largest(logits)
        has_choice = max_logits.isfinite()
        drawn = [i for i, state in enumerate(states) if state.params.temperature > 0]
        if drawn:
            drawn_rows = on_device(torch.tensor(drawn), logits.device)
            rows = logits[drawn_rows] if len(drawn) < len(states) else logits
            rows = rows.masked_fill_(~has_choice[drawn_rows, None], 0.0)  # so that any token of them can be drawn
            tokens[drawn_rows] = choose(rows, _choice((states[i] for i in drawn), ahead=newest is not None))
        return tokens, has_choice

    def _why(self, key: Hashable) -> MillpondError:
        """Return why no token is left to choose."""
        state = self._states[key]
        params = state.params
        bans_text = " and ".join(params.forbids) if key in self._forbidden else ""
        if key in self._constraints:
            within = f" within {bans_text}" if bans_text else ""
            return OptionError(
                f"after {state.step} tokens no token of the vocabulary goes on as the {params.constrained} "
                f"wants{within}"
            )
        return OptionError(f"after {state.step} tokens {bans_text} leave no token to choose") if bans_text else _NAN

    @staticmethod
    def _scores(logits: Tensor, tokens: Tensor, scored: Mapping[int, int]) -> TokenScores:
        """Return the scores of the tokens (S,) in the rows `scored`."""
        if len(scored) < len(logits):
            rows = on_device(torch.tensor([*scored]), logits.device)
            logits, tokens = logits[rows], tokens[rows]
        return TokenScores.of(logits, tokens, alternatives=any(scored.values()))


def _choice(states: Iterable[_State], *, ahead: bool) -> TokenChoice:
    """Return the parameters of the rows, with the key of this step's draw.

    Args:
        states: States of the completions.
        ahead: Whether each has a token that was not finished.
    """
    rows = [
        (
            state.params.temperature,
            state.params.top_k,
            state.params.top_p,
            state.params.min_p,
            state.params.typical_p,
            draw_key(state.seed, state.index, state.step + ahead),
        )
        for state in states
    ]
    temperature, top_k, top_p, min_p, typical_p, keys = zip(*rows, strict=True)
    return TokenChoice(
        torch.tensor(temperature, dtype=torch.float32),
        torch.tensor(top_k, dtype=torch.long),
        torch.tensor(top_p, dtype=torch.float64),
        torch.tensor(min_p, dtype=torch.float32),
        torch.tensor(typical_p, dtype=torch.float64),
        torch.tensor(keys, dtype=torch.long),
    )
