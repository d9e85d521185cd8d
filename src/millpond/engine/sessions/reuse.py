"""Sessions of an engine: storing of finished turns, and continuation of requests from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from millpond.cache.batch_cache import Pages
from millpond.cache.coded.kept_coder import KeptCodes, KeptFacts
from millpond.cache.coded.swap import SequenceFacts
from millpond.cache.coded.text import CodedText
from millpond.engine.coded.exact import exact_positions
from millpond.engine.coded.sequence_codec import SequenceCodec, SequenceEntries, has_codes
from millpond.engine.completion import CompletionState
from millpond.engine.file_loader import LoadOrder
from millpond.engine.file_loads import FileLoads
from millpond.engine.forget import drop_restored
from millpond.engine.request_state import RequestState
from millpond.engine.sessions.store import Finish, SessionStore
from millpond.engine.sessions.stored_turn import StoredTurn, TurnPlace
from millpond.engine.transfer.container import fill_cache, pages_of, sequence_tensors
from millpond.errors import CacheMismatchError, MillpondError, OptionError, PoolFullError
from millpond.hf.model_profile import ModelProfile
from millpond.prompt_marks import covers
from millpond.runner.cache_factory import CacheFactory
from millpond.runner.packed_model import LayerShape, PackedModel


class DecodedTurn(NamedTuple):
    """Sequence of a turn in codes.

    Attributes:
        entries: Its sequence.
        codes: The codes that it was decoded from.
    """

    entries: SequenceEntries
    codes: CodedText


class LoadedTurn:
    """Longest stored turn that a request continues, once it was read and checked.

    Attributes:
        place: Its name; None if there is none.
        turn: The turn; None if there is none.
        decoded: What it holds, of a turn in codes.
        kept: What later codes go on from of a turn of a method that evicts; the turn holds entries again.
    """

    def __init__(self) -> None:
        self.place: TurnPlace | None = None
        self.turn: StoredTurn | None = None
        self.decoded: DecodedTurn | None = None
        self.kept: KeptCodes | None = None
        self.on_release: Callable[[], None] | None = None
        self.on_ready: Callable[[], None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the turn, and of what it holds."""
        of_codes = 0 if self.decoded is None else self.decoded.entries.nbytes
        return of_codes + (0 if self.turn is None else self.turn.nbytes)

    def release(self) -> None:
        """Release the turn: the request needs it no longer. A second call does nothing."""
        self.place = self.turn = self.decoded = self.kept = None
        if self.on_release is not None:
            self.on_release()
            self.on_release = None


class TurnLoadSource:
    """Turns that requests wait for, see `LoadSource`.

    Args:
        store: Store of the turns.
        scopes: Returns the names of all turns that a request may continue, or an empty list.
        least: Returns the tokens of its prompt that it gets otherwise, so that a turn needs more.
        codec: Codec of turns in codes; None: there are none.
        token_bytes: Bytes of a token that was decoded.
    """

    name = "millpond-turns"
    ahead = 32
    patience_s = math.inf

    def __init__(
        self,
        store: SessionStore,
        scopes: Callable[[RequestState], list[str]],
        least: Callable[[RequestState], int],
        codec: SequenceCodec | None = None,
        token_bytes: int = 0,
    ) -> None:
        self._store, self._scopes, self._least, self.limit = store, scopes, least, store.loading
        self._codec, self._token_bytes = codec, token_bytes

    def wants(self, state: RequestState) -> bool:
        """Return whether a prompt may continue a turn."""
        return bool(self._scopes(state))

    def empty(self) -> LoadedTurn:
        """Return an empty holder, see `LoadSource`."""
        return LoadedTurn()

    def order(self, state: RequestState) -> LoadOrder[LoadedTurn]:
        """Return the order for a request, see `LoadSource`."""
        find = _TurnFinder(self._store, state, self._scopes(state), self._least(state), self._codec, self._token_bytes)
        return LoadOrder(find.size, find.load)

    def failed(self) -> None:
        """Record a failed load, see `LoadSource`."""
        self._store.load_failed()

    def gave_up(self) -> None:
        """Do nothing, see `LoadSource`: turns are waited for."""

    def disk_hangs(self, hangs: bool) -> None:
        """Do nothing, see `LoadSource`."""


class _TurnFinder:
    """Finds the longest turn that one request continues; runs in threads of the loader."""

    def __init__(
        self,
        store: SessionStore,
        state: RequestState,
        scopes: list[str],
        least: int,
        codec: SequenceCodec | None,
        token_bytes: int,
    ) -> None:
        self._store, self._state, self._scopes, self._least = store, state, scopes, least
        self._codec, self._token_bytes = codec, token_bytes
        self._places: list[TurnPlace] = []
        self._max_bytes = 0  # of a file

    def size(self) -> int:
        """Return the most bytes of a turn that it may continue; 0: there is none."""
        ids, salt = self._state.ids_array, self._state.request.cache_salt
        candidates = [place for scope in self._scopes for place in self._store.known(salt, scope, ids)]
        self._places = sorted(
            (place for place in candidates if place.length > self._least), key=lambda place: place.length, reverse=True
        )
        self._max_bytes = max(map(self._store.size_of, self._places), default=0)
        longest = self._token_bytes * max((place.length for place in self._places), default=0)
        return max(self._max_bytes + longest, 1) if self._places else 0  # an empty file is seen, and removed, too

    def load(self, loaded: LoadedTurn, is_wanted: Callable[[], bool]) -> None:
        """Read turns, the longest first, until one is whole and has not forgotten too much.

        It may have forgotten no more than the request does.
        """
        for place in self._places:
            if not is_wanted():
                return
            turn = self._store.read(place, self._state.ids_array[: place.length], self._max_bytes)
            if turn is None or not covers(self._state.marks.forget, turn.forgotten):
                continue
            if turn.codes is not None:
                try:
                    turn = self._decode(turn, loaded)
                except MillpondError:
                    self._store.refuse(place)
                    continue
            loaded.place, loaded.turn = place, turn
            return

    def _decode(self, turn: StoredTurn, loaded: LoadedTurn) -> StoredTurn:
        """Decode a turn in codes for the holder, and return the turn.

        It has entries where its method evicts.

        Raises:
            DataError, CacheMismatchError: it is damaged, or of another codec.
        """
        if self._codec is None or turn.codes is None:
            raise CacheMismatchError("a turn is in codes, and there is no storage codec")
        self._codec.check_mark(turn.codes)
        if turn.codes == self._codec.kept.mark:
            entries, loaded.kept = self._codec.kept.decode(turn.tensors, turn.ids)
            return replace(turn, tensors=entries, codes=None)
        loaded.decoded = DecodedTurn(*self._codec.decode(turn.tensors, turn.ids))
        return turn


class SessionReuse:
    """A session store with the model that uses it.

    Args:
        store: The store.
        model: The model.
        mark: Mark of the model, see `session_mark`.
        has: Returns whether some pages are free.
        known: Returns the tokens of a prompt that a request gets without its session.
        codec: Codes turns that have codes; None: turns are stored as they are.

    Attributes:
        loads: Requests whose turns are read before they begin.
    """

    def __init__(
        self,
        store: SessionStore,
        model: PackedModel,
        mark: str,
        has: Callable[[Pages], bool],
        known: Callable[[RequestState], int],
        codec: SequenceCodec | None = None,
    ) -> None:
        self.store, self._model, self._mark, self._has, self._known = store, model, mark, has, known
        self._n_heads, self._codec = ModelProfile.of(model.model).n_heads, codec
        numbers = sum(layer.n_kv_heads * (layer.key_dim + layer.value_dim) for layer in model.layers)
        token_bytes = 0 if codec is None else numbers * model.dtype.itemsize
        self.loads = FileLoads(TurnLoadSource(store, self._continues, known, codec, token_bytes))

    def attach(self, state: RequestState) -> int:
        """Give a request that begins the cache of a stored turn that it continues.

        See `PromptSource`. A turn that cannot be continued, finds no memory, or brings no more than the request gets
        otherwise, is a miss.
        """
        min_tokens = self._known(state)
        loaded = self.loads.begin(state)
        if loaded is None:
            return 0
        restored = self._restore(state, loaded, min_tokens)
        loaded.release()
        self.store.counts["hits" if restored else "misses"] += 1
        return restored

    def _restore(self, state: RequestState, loaded: LoadedTurn, min_tokens: int) -> int:
        place, turn = loaded.place, loaded.turn
        if place is None or turn is None or place.length <= min_tokens:
            return 0
        try:
            if loaded.decoded is None:
                self._fill(state, turn)
                for completion in state.completions:
                    completion.kept = loaded.kept
            else:
                self._fill_decoded(state, loaded.decoded, turn.ids)
        except PoolFullError:
            return 0
        except Exception:  # whatever a file makes of itself, its request reads the prompt
            self.store.refuse(place)
            return 0
        state.restored = place.length
        exact = turn.exact and not state.marks.forget
        state.restored_exact = exact and keeps_exactly(state.group.cache_factory, self._model.layers)
        return place.length

    def _continues(self, state: RequestState) -> list[str]:
        """Return the scopes of the turns that a request may continue; none: it reads its prompt.

        Turns that have forgotten spans are separate: only a request that forgets these too may continue them.
        """
        cache_factory = state.group.cache_factory
        has_own_treatment = state.spans or state.marks.keep or state.marks.shares or state.prompt_logprobs is not None
        has_own_treatment = has_own_treatment or state.images is not None
        if not state.completions or has_own_treatment or why_not(cache_factory) is not None:
            return []
        scopes = [self._scope(cache_factory, forgets) for forgets in ([True, False] if state.marks.forget else [False])]
        if self._codec is not None and not state.marks.forget:
            scopes.append(self._scope(cache_factory, False, self._mark_of_codes(self._codec, cache_factory)))
        return scopes

    def _fill(self, state: RequestState, turn: StoredTurn) -> None:
        """Fill a cache with a turn, for a request that begins.

        Raises:
            PoolFullError, DataError: see `fill_cache`; nothing is left behind.
        """
        cache_factory, layers = state.group.cache_factory, self._model.layers
        if not self._has(pages_of(cache_factory, layers, [turn.tensors], 1)):
            raise PoolFullError("no room for a stored turn; its request reads its prompt")
        batch_cache = cache_factory.make_cache(len(state.ids))
        try:
            ids = torch.from_numpy(turn.ids).to(self._model.device)
            fill_cache(batch_cache, cache_factory, layers, self._n_heads, turn.tensors, ids)
            if state.marks.forget:
                drop_restored(batch_cache, state.marks.forget, turn.forgotten, len(turn.ids))
            for layer_cache in batch_cache.layers:
                layer_cache.reopen(self._model.dtype)
        except BaseException:
            batch_cache.clear()
            raise
        state.private_cache = batch_cache

    def _fill_decoded(self, state: RequestState, turn: DecodedTurn, ids: np.ndarray) -> None:
        """Fill a cache with a turn that was decoded, for a request that begins.

        Raises:
            PoolFullError, DataError: see `SequenceCodec.fill`; nothing is left behind.
        """
        assert self._codec is not None, "there are turns in codes"
        cache_factory = state.group.cache_factory
        if not self._has(self._codec.pages(cache_factory, len(ids))):
            raise PoolFullError("no room for a stored turn; its request reads its prompt")
        batch_cache = cache_factory.make_cache(len(state.ids))
        try:
            self._codec.fill(batch_cache, turn.entries, torch.from_numpy(ids).to(self._model.device))
        except BaseException:
            batch_cache.clear()
            raise
        if batch_cache.samples is not None:
            batch_cache.samples.begin_with(turn.codes.exact(len(ids)))
        for completion in state.completions:
            completion.codes = turn.codes
        state.private_cache = batch_cache

    def keep(self, state: RequestState) -> None:
        """Store the caches of the answers of a request that have just ended."""
        own_treatment = state.marks.keep or state.marks.shares or state.images is not None
        if own_treatment or why_not(state.group.cache_factory) is not None:
            return
        for completion in state.completions:
            if completion.finish_reason in ("stop", "length"):
                self._keep(state, completion)

    def _keep(self, state: RequestState, completion: CompletionState) -> None:
        holder, cache_factory = state.cache(completion.index), state.group.cache_factory
        if holder is None or completion.kv is None or not self.store.has_room(completion.kv.kv_bytes):
            return
        batch_cache, place = holder
        ids = np.concatenate([state.ids_array, np.array(completion.tokens[:-1], dtype=np.int64)])
        if int(batch_cache.tracker.seen[place]) != len(ids):
            return
        if self._keep_codes(state, completion, ids):
            return
        tensors = sequence_tensors(cache_factory, batch_cache, place, later_prompts=True)
        copies = {name: tensor.clone() for name, tensor in tensors.items()}  # the cache goes on with some of them
        turn = StoredTurn(ids, copies, state.exact, state.marks.forget)
        self.store.put(state.request.cache_salt, self._scope(cache_factory, bool(state.marks.forget)), turn)

    def _keep_codes(self, state: RequestState, completion: CompletionState, ids: np.ndarray) -> bool:
        """Store the cache of an answer in codes, which another thread makes; False: it has none."""
        holder, cache_factory, codec = state.cache(completion.index), state.group.cache_factory, self._codec
        if holder is None or codec is None or state.marks.forget:
            return False
        exact = exact_positions(state, len(codec.coder.transform.layers))
        finish: Finish
        if codec.kept.has_codes(cache_factory):
            kept = codec.kept.read(cache_factory, *holder, later_prompts=True)
            if kept is None:
                return False
            held = kept
            finish = partial(_finished_kept, codec, KeptFacts(ids, exact, completion.kept))
        elif has_codes(cache_factory):
            entries = codec.read(cache_factory, *holder)
            if entries is None:
                return False
            held = entries.tensors()
            finish = partial(_finished, codec, entries, SequenceFacts(ids, exact, completion.codes))
        else:
            return False
        scope = self._scope(cache_factory, False, self._mark_of_codes(codec, cache_factory))
        self.store.put(state.request.cache_salt, scope, StoredTurn(ids, held, exact=False), finish)
        return True

    @staticmethod
    def _mark_of_codes(codec: SequenceCodec, cache_factory: CacheFactory) -> str:
        return codec.mark if cache_factory.policy.keeps_all else codec.kept.mark

    def _scope(self, cache_factory: CacheFactory, forgets: bool, codes: str | None = None) -> str:
        own = ["forgets"] if forgets else []
        if codes is None:  # codes go into pages of any size
            own = [str(cache_factory.pool(self._model.layers[0]).slots), *own]
        return self.store.scope(self._mark, cache_factory.described, *own, *([] if codes is None else ["codes", codes]))


def _finished(codec: SequenceCodec, entries: SequenceEntries, facts: SequenceFacts, turn: StoredTurn) -> StoredTurn:
    """Return a turn in codes that holds all tokens."""
    return replace(turn, tensors=codec.code(entries, facts)[0], codes=codec.mark)


def _finished_kept(codec: SequenceCodec, facts: KeptFacts, turn: StoredTurn) -> StoredTurn:
    """Return a turn of a method that evicts in codes."""
    return replace(turn, tensors=codec.kept.code(turn.tensors, facts), codes=codec.kept.mark)


def why_not(cache_factory: CacheFactory) -> str | None:
    """Return why a cache cannot be stored and continued by a later turn; None: it can."""
    if cache_factory.tier is not None:
        return "its keys and values lie on a disk already, in files of one process"
    if cache_factory.host_kv is not None:
        return "its layers have keys and values on different tiers"
    if cache_factory.whole_prompt:
        return "it reads a prompt in one pass, and a later turn would not see what it looked up"
    return None


def keeps_exactly(cache_factory: CacheFactory, layers: Sequence[LayerShape]) -> bool:
    """Return whether a later turn sees all tokens before it as the model made them."""
    plain = all(
        not cache_factory.packed_pools(layer) and cache_factory.pool(layer) is cache_factory.prompt_pool(layer)
        for layer in layers
    )
    return cache_factory.policy.keeps_all and plain


def check_continues(cache_factory: CacheFactory, method: str) -> None:
    """Check that caches of a method can be stored as sessions.

    Raises:
        OptionError: they cannot; the message says why.
    """
    if (why := why_not(cache_factory)) is not None:
        raise OptionError(
            f"cache_dir= stores caches of finished turns, and one of method {method!r} cannot be continued: {why}; "
            "leave cache_dir out, or use a method such as 'h2o', 'snapkv' or 'full'"
        )
