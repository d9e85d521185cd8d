"""RequestTransfer: requests of an engine that leave as snapshots, and snapshots that become requests of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from millpond.cache.batch_cache import BatchCache
from millpond.cache.swap import parts_of
from millpond.engine.completion import with_texts
from millpond.engine.components import Components
from millpond.engine.outputs import Times, TokenLogprob
from millpond.engine.request import Request
from millpond.engine.request_state import RequestState
from millpond.engine.request_validation import RequestValidator
from millpond.engine.sampling.sampler import Sampled
from millpond.engine.scheduler import State
from millpond.engine.transfer.container import fill_cache, pages_of, sequence_tensors
from millpond.engine.transfer.request_snapshot import Ages, AnswerSnapshot, Logprob, RequestSnapshot, logprob_of
from millpond.errors import CacheMismatchError, DataError, OptionError, PoolFullError
from millpond.hf.model_profile import ModelProfile
from millpond.runner.cache_factory import CacheFactory

#: Seconds that a request has on arrival whose deadline came on the way.
_NO_TIME = 1e-9


class RequestTransfer:
    """Makes snapshots of an engine's requests, and requests of snapshots.

    Args:
        validator: checks the requests of snapshots.
    """

    def __init__(self, parts: Components, validator: RequestValidator) -> None:
        self._model, self._fingerprint, self._files = parts.model, parts.model_mark, parts.swap_files
        self._scheduler, self._sampler, self._sharing = parts.scheduler, parts.sampler, parts.prefix_cache
        self._requests, self._loads = parts.requests, parts.file_loads
        self._validator, self._tokenizer = validator, parts.tokenizer
        self._n_heads = ModelProfile.of(parts.model.model).n_heads

    # ------------------------------------------------------------------ out

    def to_bytes(self, live: RequestState) -> bytes:
        """A snapshot of a request, which stays as it is.

        Raises:
            OptionError: caches on a disk, options that cannot be written down, or a request that is read again.
            PoolFullError: it is swapped out, and there is no room to read its pages.
            DataError: the file with its pages is broken.
        """
        recipe = live.group.recipe
        if recipe.tier is not None:
            raise OptionError("keys and values on a disk do not move: use engines that keep them in memory")
        if live.replaying:
            raise OptionError(
                f"request {live.request.request_id!r} is read again, since a pass failed that it had a part of; call "
                "again after some steps"
            )
        if live.job.read < live.job.prompt:
            return self._snapshot(live, []).to_bytes()
        if live.stack is None:
            places = [live.group.answers.index(answer) for answer in live.unfinished]
            return self._snapshot(live, _caches(recipe, live.group.stack, places)).to_bytes()
        if not self._sharing.has(live.stack.pages_to_swap_in()):
            raise PoolFullError(
                f"request {live.request.request_id!r} is swapped out, and the pool has no room to read its pages; call "
                "again after some steps, or cancel another request"
            )
        live.stack.swap_in()
        try:
            return self._snapshot(live, _caches(recipe, live.stack, list(range(live.stack.n_seq)))).to_bytes()
        except BaseException:
            live.stack.swap_out(self._files)
            raise

    def _snapshot(self, live: RequestState, caches: Sequence[Mapping[str, Tensor]]) -> RequestSnapshot:
        now, request, times = time.monotonic(), live.request, live.times
        begun, prompt = bool(caches), request.prompt
        moving = replace(
            request,
            prompt=live.ids,
            known=(),
            cache_salt=None if begun else request.cache_salt,
            deadline=None if live.job.deadline is None else max(live.job.deadline - now, _NO_TIME),
        )
        return RequestSnapshot(
            request=moving,
            text=prompt if isinstance(prompt, str) else None,
            answers=tuple(self._answer(live, index) for index in range(len(live.answers))),
            ages=Ages(
                arrived=now - times.arrived,
                started=None if times.started is None else now - times.started,
                first_token=None if times.first_token is None else now - times.first_token,
            ),
            model=self._fingerprint(),
            recipe=live.group.recipe.described,
            prompt_logprobs=_logprobs(live.prompt_logprobs) if begun else None,
            caches=caches,
        )

    def _answer(self, live: RequestState, index: int) -> AnswerSnapshot:
        answer = live.answers[index]
        shown = answer.show()
        return AnswerSnapshot(
            seed=0 if answer.finished else self._sampler.seed_of(answer.key),
            tokens=shown.token_ids,
            known=() if answer.finished else self._sampler.known_of(answer.key),
            logprobs=None if shown.logprobs is None else tuple(map(logprob_of, shown.logprobs)),
            finish_reason=answer.finish_reason,
            shared=answer.shared,
        )

    # ------------------------------------------------------------------ in

    def restore(self, snapshot: RequestSnapshot) -> RequestState:
        """A request of the engine, which is in flight from now on.

        Raises:
            CacheMismatchError: another model, or a cache that is kept in another way here.
            DataError: values that no such request has. PoolFullError: there is no room now.
            OptionError, BudgetError, UnsupportedModelError: see `Engine.add`. Nothing is left behind in any case.
        """
        request = self._checked(snapshot)
        live = self._validator.validate(request)
        recipe = live.group.recipe
        if snapshot.recipe != recipe.described:
            raise CacheMismatchError(
                f"the request's cache is kept as {snapshot.recipe[:300]}, and here it would be kept as "
                f"{recipe.described[:300]}: give both engines the same method, options, budget, codec and calibration"
            )
        if snapshot.text is not None:
            live.request = replace(request, prompt=snapshot.text)
        now, ages = time.monotonic(), snapshot.ages
        started, first = (None if age is None else now - age for age in (ages.started, ages.first_token))
        live.times = Times(now - ages.arrived, started, first)
        keys = [answer.key for answer in live.answers]
        try:
            self._start(live, snapshot)
            if snapshot.begun:
                self._continue(live, snapshot)
            else:
                self._scheduler.add(live.job)
        except BaseException:
            for key in keys:
                self._sampler.stop(key)
            raise
        self._requests.add(live)
        for loads in self._loads if not live.job.read else ():
            loads.add(live)
        return live

    def _checked(self, snapshot: RequestSnapshot) -> Request:
        """The request as the engine takes it in."""
        if snapshot.model != self._fingerprint():
            raise CacheMismatchError(
                "the request was begun with another model, with other weights, or with weights in another format: give "
                "both engines the same"
            )
        request, answers = snapshot.request, snapshot.answers
        self._requests.check_names([request.request_id])
        if len(answers) != request.params.n:
            raise DataError(f"the request has {len(answers)} answers, and n={request.params.n}; send it once more")
        known = tuple(answer.known for answer in answers)
        return replace(request, known=() if snapshot.begun or not any(known) else known)

    def _start(self, live: RequestState, snapshot: RequestSnapshot) -> None:
        """Let the sampler and the answers know all tokens so far."""
        params = live.request.params
        grammar, bans = self._sampler.grammars.of(params), self._sampler.bans_of(params)
        for answer, stored in zip(live.answers, snapshot.answers, strict=True):
            for token in (*stored.tokens, *stored.known):
                if not 0 <= token < self._model.vocabulary:
                    raise DataError(f"token id {token} is not one of the model's {self._model.vocabulary}")
            answer.shared = stored.shared
            found = stored.logprobs or ()
            if params.logprobs is not None and len(found) != len(stored.tokens):
                raise DataError(f"{len(found)} log probabilities of {len(stored.tokens)} tokens; send it once more")
            for place, token in enumerate(stored.tokens):
                if answer.finished:
                    raise DataError(f"answer {answer.index} has tokens behind its end; send it once more")
                answer.take(Sampled(token, *(found[place][1:] if found else ())))
            if stored.finish_reason is None and answer.finished:
                raise DataError(f"answer {answer.index} ends before its last token; send it once more")
            if stored.finish_reason is not None and not answer.finished:
                answer.end(stored.finish_reason)
            if not answer.finished:
                self._sampler.start(
                    answer.key,
                    params,
                    live.ids,
                    answer.index,
                    grammar,
                    bans,
                    seed=stored.seed,
                    said=stored.tokens,
                    known=stored.known,
                )

    def _continue(self, live: RequestState, snapshot: RequestSnapshot) -> None:
        """Decode behind the caches of a snapshot."""
        going, caches, recipe, job = live.unfinished, snapshot.caches, live.group.recipe, live.job
        alike = len(caches) == 1 < len(going)
        if not going or (not alike and len(caches) != len(going)) or not all(answer.tokens for answer in going):
            raise DataError(f"{len(caches)} caches of {len(going)} answers that continue; send the request once more")
        if alike and any(len(answer.tokens) > 1 for answer in going):
            raise DataError("answers of several tokens have one cache; send the request once more")
        if snapshot.prompt_logprobs is not None and live.prompt_logprobs is not None:
            live.prompt_logprobs = [one if one is None else self._logprob(one) for one in snapshot.prompt_logprobs]
        job.read, job.width, job.state = job.prompt, len(going), State.DECODING
        job.age = max((len(answer.tokens) for answer in going), default=0)
        need = pages_of(recipe, self._model.layers, caches, len(going))
        if not self._scheduler.may_join(job) or not self._sharing.has(need):
            raise PoolFullError(
                f"the requests in flight leave no room for {job.reserved:,} bytes of a request with {job.width} "
                "answers; take it over after some of them have ended, or raise kv_memory or max_running"
            )
        stack = recipe.stack()
        try:
            for cache, answer in zip(caches, going, strict=False):
                self._fill(stack, recipe, cache, (*live.ids, *answer.tokens[:-1]), live)
            if alike:
                stack.select([0] * len(going))
        except BaseException:
            stack.clear()
            raise
        self._scheduler.add(job)
        live.group = live.group.with_room(len(going))
        live.group.join(stack, going)
        live.group.update_stats()

    def _fill(
        self,
        stack: BatchCache,
        recipe: CacheFactory,
        cache: Mapping[str, Tensor],
        ids: Sequence[int],
        live: RequestState,
    ) -> None:
        """Add one sequence to a stack."""
        one = recipe.stack()
        one.mark(live.marks)
        try:
            tokens = torch.tensor(ids, dtype=torch.int64, device=self._model.device)
            fill_cache(one, recipe, self._model.layers, self._n_heads, cache, tokens)
            one.tracker.marks.dropped.add(live.marks.forget, 0)
            stack.join(one)
        except BaseException:
            one.clear()
            raise

    def _logprob(self, found: Logprob) -> TokenLogprob:
        return with_texts(self._tokenizer, *found)


def _caches(recipe: CacheFactory, stack: BatchCache, places: Sequence[int]) -> list[dict[str, Tensor]]:
    """The tensors of some sequences of a stack, once where they have written nothing of their own yet."""
    chosen = places[:1] if _alike(stack, places) else places
    return [sequence_tensors(recipe, stack, place) for place in chosen]


def _alike(stack: BatchCache, places: Sequence[int]) -> bool:
    """Whether several sequences hold the same pages, and no others: they have not decoded yet."""
    chosen = list(places)
    for layer_cache in stack.layers:
        if layer_cache.table is None or len(chosen) < 2:
            return False
        for part in parts_of(layer_cache.table):
            ids = part.page_lists.ids.reshape(layer_cache.table.n_seq, layer_cache.table.n_kv_heads, -1)[chosen]
            if not (ids == ids[:1]).all():
                return False
        lengths = layer_cache.table.entries()[chosen]
        if not (lengths == lengths[:1]).all():
            return False
    return True


def _logprobs(found: Sequence[TokenLogprob | None] | None) -> tuple[Logprob | None, ...] | None:
    return None if found is None else tuple(one if one is None else logprob_of(one) for one in found)
