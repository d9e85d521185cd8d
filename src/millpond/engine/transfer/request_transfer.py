"""Transfer of requests: an engine's requests become snapshots, and snapshots become its requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from millpond.cache.batch_cache import BatchCache
from millpond.cache.coded.kept_coder import KeptCodes, KeptFacts
from millpond.cache.coded.swap import SequenceFacts
from millpond.cache.coded.text import CodedText
from millpond.cache.swap import parts_of
from millpond.engine.coded.exact import exact_positions
from millpond.engine.coded.sequence_codec import SequenceCodec, SequenceEntries, has_codes
from millpond.engine.completion import CompletionState, with_texts
from millpond.engine.components import Components
from millpond.engine.outputs import Times, TokenLogprob
from millpond.engine.request import Request
from millpond.engine.request_state import RequestState
from millpond.engine.request_validation import RequestValidator
from millpond.engine.sampling.sampler import Sampled
from millpond.engine.scheduler_request import RequestStatus
from millpond.engine.transfer.container import fill_cache, pages_of, sequence_tensors
from millpond.engine.transfer.request_snapshot import Ages, CompletionSnapshot, Logprob, RequestSnapshot, logprob_of
from millpond.errors import CacheMismatchError, DataError, OptionError, PoolFullError
from millpond.hf.model_profile import ModelProfile
from millpond.runner.cache_factory import CacheFactory

#: Seconds that remain on arrival for a request whose deadline passed during its transfer.
_NO_TIME = 1e-9


@dataclass(frozen=True, slots=True)
class Arrival:
    """Request of another engine that was read, and takes part in nothing yet.

    Attributes:
        snapshot: What was sent.
        decoded: Its sequences that were sent in codes, each with these.
        kept: What later codes go on from of its sequences of which entries were evicted; they are entries in the
            snapshot again.
    """

    snapshot: RequestSnapshot
    decoded: Sequence[tuple[SequenceEntries, CodedText]] = field(default=(), repr=False)
    kept: Sequence[KeptCodes] = field(default=(), repr=False)


class RequestTransfer:
    """Makes snapshots of an engine's requests, and requests of snapshots.

    Args:
        parts: Parts of the engine.
        validator: Checks the requests of snapshots.
    """

    def __init__(self, parts: Components, validator: RequestValidator) -> None:
        self._model, self._fingerprint, self._swap_files = parts.model, parts.model_mark, parts.swap_files
        self._scheduler, self._sampler, self._prefix_cache = parts.scheduler, parts.sampler, parts.prefix_cache
        self._requests, self._file_loads = parts.requests, parts.file_loads
        self._validator, self._tokenizer = validator, parts.tokenizer
        self._codec = parts.sequence_codec
        self._n_heads = ModelProfile.of(parts.model.model).n_heads

    # ------------------------------------------------------------------ out

    def to_bytes(self, state: RequestState) -> Future[bytes]:
        """Return a snapshot of a request, which stays unchanged, in bytes.

        It is taken at once. Where it has codes, another thread makes these, and the bytes come later.

        Raises:
            OptionError: caches on a disk, options that cannot be written down, or a request that is read again.
            PoolFullError: it is swapped out, and no memory is free to read its pages.
            DataError: the file with its pages is broken.
        """
        cache_factory = state.group.cache_factory
        if cache_factory.tier is not None:
            raise OptionError("keys and values on a disk do not move: use engines that keep them in memory")
        if state.images is not None:
            raise OptionError(
                f"request {state.request.request_id!r} has images, which move to no other engine; let it finish here"
            )
        if cache_factory.host_kv is not None:
            raise OptionError("keys and values on several tiers do not move: use engines that keep them in one memory")
        if state.replaying:
            raise OptionError(
                f"request {state.request.request_id!r} is read again, since a pass failed that it had a part of; call "
                "again after some steps"
            )
        if state.scheduled.num_computed_tokens < state.scheduled.num_prompt_tokens:
            return self._written(self._snapshot(state, []))
        if state.private_cache is None:
            sequences = [state.group.completions.index(completion) for completion in state.unfinished]
            return self._with_caches(state, state.group.batch_cache, sequences)
        if not self._prefix_cache.make_room(state.private_cache.pages_to_swap_in()):
            raise PoolFullError(
                f"request {state.request.request_id!r} is swapped out, and the pool has no room to read its pages; "
                "call again after some steps, or cancel another request"
            )
        state.private_cache.swap_in()
        try:
            sequences = list(range(state.private_cache.n_seq))
            return self._with_caches(state, state.private_cache, sequences)
        except BaseException:
            state.private_cache.swap_out(self._swap_files)
            raise

    @staticmethod
    def _written(snapshot: RequestSnapshot) -> Future[bytes]:
        written: Future[bytes] = Future()
        written.set_result(snapshot.to_bytes())
        return written

    def _with_caches(self, state: RequestState, batch_cache: BatchCache, sequences: Sequence[int]) -> Future[bytes]:
        """Return a snapshot with the answers' sequences; those that hold the same are in it once."""
        cache_factory, codec = state.group.cache_factory, self._codec
        distinct = sequences[:1] if _alike(batch_cache, sequences) else sequences
        exact = state.prompt_logprobs is not None or bool(state.marks.forget) or state.decoded > 0
        if codec is not None and not exact:
            to_code = self._to_code(state, codec, batch_cache, distinct)
            if to_code:
                mark = codec.mark if cache_factory.policy.keeps_all else codec.kept.mark
                snapshot = self._snapshot(state, [{}] * len(to_code), mark)
                snapshot.check_written()
                return codec.submit(partial(_bytes_in_codes, snapshot, to_code))
        caches = [sequence_tensors(cache_factory, batch_cache, sequence) for sequence in distinct]
        return self._written(self._snapshot(state, caches))

    @staticmethod
    def _to_code(
        state: RequestState, codec: SequenceCodec, batch_cache: BatchCache, sequences: Sequence[int]
    ) -> list[Callable[[], dict[str, Tensor]]]:
        """Return what codes the sequences of answers; nothing where one has no codes."""
        cache_factory = state.group.cache_factory
        evicted = codec.kept.has_codes(cache_factory)
        if not evicted and not has_codes(cache_factory):
            return []
        positions = exact_positions(state, len(batch_cache.layers))
        to_code: list[Callable[[], dict[str, Tensor]]] = []
        for sequence, completion in zip(sequences, state.unfinished, strict=False):
            ids = np.concatenate([state.ids_array, np.array(completion.tokens[:-1], dtype=np.int64)])
            if evicted:
                tensors = codec.kept.read(cache_factory, batch_cache, sequence, later_prompts=False)
                if tensors is None:
                    return []
                to_code.append(partial(codec.kept.code, tensors, KeptFacts(ids, positions, completion.kept)))
                continue
            entries = codec.read(cache_factory, batch_cache, sequence)
            if entries is None:
                return []
            facts = SequenceFacts(ids, positions, completion.codes or completion.copied)
            to_code.append(partial(_coded, codec, entries, facts, completion))
        return to_code

    def _snapshot(
        self, state: RequestState, caches: Sequence[Mapping[str, Tensor]], codes: str | None = None
    ) -> RequestSnapshot:
        now, request, times = time.monotonic(), state.request, state.times
        begun, prompt = bool(caches), request.prompt
        moving = replace(
            request,
            prompt=state.ids,
            known=(),
            cache_salt=None if begun else request.cache_salt,
            deadline=None if state.scheduled.deadline is None else max(state.scheduled.deadline - now, _NO_TIME),
        )
        return RequestSnapshot(
            request=moving,
            text=prompt if isinstance(prompt, str) else None,
            answers=tuple(self._answer(state, index) for index in range(len(state.completions))),
            ages=Ages(
                arrived=now - times.arrived,
                started=None if times.started is None else now - times.started,
                first_token=None if times.first_token is None else now - times.first_token,
            ),
            model=self._fingerprint(),
            recipe=state.group.cache_factory.described,
            prompt_logprobs=_logprobs(state.prompt_logprobs) if begun else None,
            caches=caches,
            codes=codes,
        )

    def _answer(self, state: RequestState, index: int) -> CompletionSnapshot:
        completion = state.completions[index]
        output = completion.to_output()
        return CompletionSnapshot(
            seed=0 if completion.finished else self._sampler.seed_of(completion.key),
            tokens=output.token_ids,
            known=() if completion.finished else self._sampler.known_of(completion.key),
            logprobs=None if output.logprobs is None else tuple(map(logprob_of, output.logprobs)),
            finish_reason=completion.finish_reason,
            shared=completion.shared,
        )

    # ------------------------------------------------------------------ in

    def read(self, data: bytes | bytearray | memoryview, request: Request | None = None) -> Arrival:
        """Read a request of another engine and decode its codes; safe to call from any thread.

        Args:
            data: See `Engine.import_request`.
            request: See there.

        Raises:
            DataError, CacheMismatchError: see `Engine.import_request`.
        """
        snapshot = RequestSnapshot.from_bytes(data)
        if request is not None:
            snapshot = snapshot.continued_as(request)
        self._check_source(snapshot)
        if snapshot.codes is None or self._codec is None:
            return Arrival(snapshot)
        prompt, unfinished = snapshot.request.prompt, [one for one in snapshot.answers if one.finish_reason is None]
        assert isinstance(prompt, tuple), "it is sent as ids"
        texts = [np.array((*prompt, *answer.tokens[:-1]), dtype=np.int64) for answer in unfinished]
        if snapshot.codes == self._codec.kept.mark:
            kept = [self._codec.kept.decode(*one) for one in zip(snapshot.caches, texts, strict=False)]
            entries = [tensors for tensors, _ in kept]
            return Arrival(replace(snapshot, caches=entries, codes=None), kept=[codes for _, codes in kept])
        decoded = [self._codec.decode(*one) for one in zip(snapshot.caches, texts, strict=False)]
        return Arrival(snapshot, decoded)

    def restore(self, arrival: Arrival) -> RequestState:
        """Make a request of the engine, which is in flight from now on.

        Raises:
            CacheMismatchError: a cache that is kept in another way here. As after each of these errors, nothing is left
                behind.
            DataError: values that no such request has.
            PoolFullError: no memory is free now.
            OptionError, BudgetError, UnsupportedModelError: see `Engine.add`.
        """
        snapshot = arrival.snapshot
        request = self._checked(snapshot)
        state = self._validator.validate(request)
        cache_factory = state.group.cache_factory
        if snapshot.recipe != cache_factory.described:
            raise CacheMismatchError(
                f"the request's cache is kept as {snapshot.recipe[:300]}, and here it would be kept as "
                f"{cache_factory.described[:300]}: give both engines the same method, options, budget, codec and "
                "calibration"
            )
        if snapshot.text is not None:
            state.request = replace(request, prompt=snapshot.text)
        now, ages = time.monotonic(), snapshot.ages
        started, first = (None if age is None else now - age for age in (ages.started, ages.first_token))
        state.times = Times(now - ages.arrived, started, first)
        keys = [completion.key for completion in state.completions]
        try:
            self._start(state, snapshot)
            if snapshot.begun:
                self._continue(state, arrival)
            else:
                self._scheduler.add(state.scheduled)
        except BaseException:
            for key in keys:
                self._sampler.stop(key)
            raise
        self._requests.add(state)
        for loads in self._file_loads if not state.scheduled.num_computed_tokens else ():
            loads.add(state)
        return state

    def _check_source(self, snapshot: RequestSnapshot) -> None:
        """Check that another engine had the same model, and the same codes where it has any.

        Raises:
            CacheMismatchError: it had not.
        """
        if snapshot.model != self._fingerprint():
            raise CacheMismatchError(
                "the request was begun with another model, with other weights, or with weights in another format: give "
                "both engines the same"
            )
        if snapshot.codes is not None:
            if self._codec is None:
                raise CacheMismatchError(
                    f"the request's cache is in codes of {snapshot.codes[:120]}, and this engine has no storage codec: "
                    "give both engines the same storage_codec and calibration"
                )
            self._codec.check_mark(snapshot.codes)

    def _checked(self, snapshot: RequestSnapshot) -> Request:
        """Return the request as the engine takes it in."""
        request, answers = snapshot.request, snapshot.answers
        self._requests.check_names([request.request_id])
        if len(answers) != request.params.n:
            raise DataError(f"the request has {len(answers)} answers, and n={request.params.n}; send it once more")
        known = tuple(answer.known for answer in answers)
        return replace(request, known=() if snapshot.begun or not any(known) else known)

    def _start(self, state: RequestState, snapshot: RequestSnapshot) -> None:
        """Pass all tokens so far to the sampler and the answers."""
        params = state.request.params
        grammar, bans = self._sampler.grammars.of(params), self._sampler.bans_of(params)
        for completion, stored in zip(state.completions, snapshot.answers, strict=True):
            for token in (*stored.tokens, *stored.known):
                if not 0 <= token < self._model.vocabulary:
                    raise DataError(f"token id {token} is not one of the model's {self._model.vocabulary}")
            completion.shared = stored.shared
            logprobs = stored.logprobs or ()
            if params.logprobs is not None and len(logprobs) != len(stored.tokens):
                raise DataError(f"{len(logprobs)} log probabilities of {len(stored.tokens)} tokens; send it once more")
            for index, token in enumerate(stored.tokens):
                if completion.finished:
                    raise DataError(f"answer {completion.index} has tokens behind its end; send it once more")
                completion.append(Sampled(token, *(logprobs[index][1:] if logprobs else ())))
            if stored.finish_reason is None and completion.finished:
                raise DataError(f"answer {completion.index} ends before its last token; send it once more")
            if stored.finish_reason is not None and not completion.finished:
                completion.end(stored.finish_reason)
            if not completion.finished:
                self._sampler.start(
                    completion.key,
                    params,
                    state.ids,
                    completion.index,
                    grammar,
                    bans,
                    seed=stored.seed,
                    decoded=stored.tokens,
                    known=stored.known,
                )

    def _continue(self, state: RequestState, arrival: Arrival) -> None:
        """Decode after the caches of a snapshot."""
        snapshot = arrival.snapshot
        unfinished, caches, cache_factory, scheduled = (
            state.unfinished,
            snapshot.caches,
            state.group.cache_factory,
            state.scheduled,
        )
        share_cache = len(caches) == 1 < len(unfinished)
        if (
            not unfinished
            or (not share_cache and len(caches) != len(unfinished))
            or not all(completion.tokens for completion in unfinished)
        ):
            raise DataError(
                f"{len(caches)} caches of {len(unfinished)} answers that continue; send the request once more"
            )
        if share_cache and any(len(completion.tokens) > 1 for completion in unfinished):
            raise DataError("answers of several tokens have one cache; send the request once more")
        if snapshot.prompt_logprobs is not None and state.prompt_logprobs is not None:
            state.prompt_logprobs = [
                logprob if logprob is None else self._logprob(logprob) for logprob in snapshot.prompt_logprobs
            ]
        scheduled.num_computed_tokens, scheduled.num_answers, scheduled.status = (
            scheduled.num_prompt_tokens,
            len(unfinished),
            RequestStatus.DECODE,
        )
        scheduled.num_decoded_tokens = max((len(completion.tokens) for completion in unfinished), default=0)
        if snapshot.codes is None or self._codec is None:
            need = pages_of(cache_factory, self._model.layers, caches, len(unfinished))
        else:
            longest = len(state.ids) + max(len(completion.tokens) for completion in unfinished)
            need = self._codec.pages(cache_factory, longest, len(caches))
        if not self._scheduler.can_admit_transferred(scheduled) or not self._prefix_cache.make_room(need):
            raise PoolFullError(
                f"the requests in flight leave no room for {scheduled.reserved_bytes:,} bytes of a request with "
                f"{scheduled.num_answers} answers; take it over after some of them have ended, or raise "
                "kv_memory or max_running"
            )
        batch_cache = cache_factory.make_cache()
        try:
            for number, completion in enumerate(unfinished[: len(caches)]):
                ids = (*state.ids, *completion.tokens[:-1])
                if snapshot.codes is None:
                    self._fill(batch_cache, cache_factory, caches[number], ids, state)
                    codes: CodedText | KeptCodes | None = arrival.kept[number] if arrival.kept else None
                else:
                    entries, codes = arrival.decoded[number]
                    self._fill_decoded(batch_cache, cache_factory, entries, ids, state)
                for own in unfinished if share_cache else [completion]:
                    if codes is not None:
                        own.decoded_from(codes, len(state.ids))
            if share_cache:
                batch_cache.select([0] * len(unfinished))
        except BaseException:
            batch_cache.clear()
            raise
        self._scheduler.add(scheduled)
        state.group = state.group.with_room(len(unfinished))
        state.group.join(batch_cache, unfinished)
        state.group.update_stats()

    def _fill(
        self,
        batch_cache: BatchCache,
        cache_factory: CacheFactory,
        cache: Mapping[str, Tensor],
        ids: Sequence[int],
        state: RequestState,
    ) -> None:
        """Add one sequence to a batch cache."""
        single_cache = cache_factory.make_cache()
        single_cache.mark(state.marks)
        try:
            tokens = torch.tensor(ids, dtype=torch.int64, device=self._model.device)
            fill_cache(single_cache, cache_factory, self._model.layers, self._n_heads, cache, tokens)
            single_cache.tracker.marks.dropped.add(state.marks.forget, 0)
            batch_cache.join(single_cache)
        except BaseException:
            single_cache.clear()
            raise

    def _fill_decoded(
        self,
        batch_cache: BatchCache,
        cache_factory: CacheFactory,
        entries: SequenceEntries,
        ids: Sequence[int],
        state: RequestState,
    ) -> None:
        """Add one sequence that was in codes to a batch cache, as if its prompt had been read."""
        assert self._codec is not None, "it was checked"
        single_cache = cache_factory.make_cache(len(ids))
        single_cache.mark(state.marks)
        try:
            self._codec.fill(single_cache, entries, torch.tensor(ids, dtype=torch.int64, device=self._model.device))
            single_cache.run_plans()
            batch_cache.join(single_cache)
        except BaseException:
            single_cache.clear()
            raise

    def _logprob(self, logprob: Logprob) -> TokenLogprob:
        return with_texts(self._tokenizer, *logprob)


def _coded(
    codec: SequenceCodec, entries: SequenceEntries, facts: SequenceFacts, completion: CompletionState
) -> dict[str, Tensor]:
    """Return a sequence in codes, on which those of its next copy build."""
    tensors, completion.copied = codec.code(entries, facts)
    return tensors


def _bytes_in_codes(snapshot: RequestSnapshot, to_code: Sequence[Callable[[], dict[str, Tensor]]]) -> bytes:
    """Return the bytes of a snapshot whose caches are to be coded."""
    return replace(snapshot, caches=[code() for code in to_code]).to_bytes()


def _alike(batch_cache: BatchCache, sequences: Sequence[int]) -> bool:
    """Return whether several sequences hold the same pages and no others.

    They have not decoded yet then.
    """
    indices = list(sequences)
    for layer_cache in batch_cache.layers:
        if layer_cache.table is None or len(indices) < 2:
            return False
        for part in parts_of(layer_cache.table):
            ids = part.page_lists.ids.reshape(layer_cache.table.n_seq, layer_cache.table.n_kv_heads, -1)[indices]
            if not (ids == ids[:1]).all():
                return False
        lengths = layer_cache.table.entries()[indices]
        if not (lengths == lengths[:1]).all():
            return False
    return True


def _logprobs(token_logprobs: Sequence[TokenLogprob | None] | None) -> tuple[Logprob | None, ...] | None:
    return (
        None
        if token_logprobs is None
        else tuple(
            token_logprob if token_logprob is None else logprob_of(token_logprob) for token_logprob in token_logprobs
        )
    )
