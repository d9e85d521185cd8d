"""Files of stored turns as requests wait for them."""

from __future__ import annotations

from collections.abc import Callable

from millpond.cache.state.spans import covers
from millpond.engine.file_loader import LoadOrder
from millpond.engine.request_state import RequestState
from millpond.engine.sessions.key import TurnPlace
from millpond.engine.sessions.store import SessionStore
from millpond.engine.sessions.stored_turn import StoredTurn


class LoadedTurn:
    """The longest stored turn that a request continues, once it was read and checked.

    Attributes:
        place, turn: None where there is none.
    """

    def __init__(self) -> None:
        self.place: TurnPlace | None = None
        self.turn: StoredTurn | None = None
        self.on_release: Callable[[], None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the turn."""
        return 0 if self.turn is None else self.turn.nbytes

    def release(self) -> None:
        """The request needs it no longer; a second call does nothing."""
        self.place = self.turn = None
        if self.on_release is not None:
            self.on_release()
            self.on_release = None


class TurnLoadSource:
    """See `LoadSource`.

    Args:
        scopes: names of all turns that a request may continue; none: it continues none. least: tokens of its prompt
            that it gets otherwise, so that a turn needs more.
    """

    name = "millpond-turns"
    ahead = 32

    def __init__(
        self, store: SessionStore, scopes: Callable[[RequestState], list[str]], least: Callable[[RequestState], int]
    ) -> None:
        self._store, self._scopes, self._least, self.limit = store, scopes, least, store.loading

    def wants(self, live: RequestState) -> bool:
        """A prompt that may continue a turn."""
        return bool(self._scopes(live))

    def empty(self) -> LoadedTurn:
        """See `LoadSource`."""
        return LoadedTurn()

    def order(self, live: RequestState) -> LoadOrder[LoadedTurn]:
        """See `LoadSource`."""
        find = _TurnFinder(self._store, live, self._scopes(live), self._least(live))
        return LoadOrder(find.size, find.load)

    def failed(self) -> None:
        """See `LoadSource`."""
        self._store.load_failed()


class _TurnFinder:
    """Finds the longest turn that one request continues; both methods run in threads of the loader."""

    def __init__(self, store: SessionStore, live: RequestState, scopes: list[str], least: int) -> None:
        self._store, self._live, self._scopes, self._least = store, live, scopes, least
        self._places: list[TurnPlace] = []
        self._most = 0  # bytes of a file

    def size(self) -> int:
        """Most bytes of a turn that it may continue; 0: there is none."""
        ids, salt = self._live.numbers, self._live.request.cache_salt
        known = [place for scope in self._scopes for place in self._store.known(salt, scope, ids)]
        self._places = sorted(
            (place for place in known if place.length > self._least), key=lambda place: place.length, reverse=True
        )
        self._most = max(map(self._store.size_of, self._places), default=0)
        return max(self._most, 1) if self._places else 0  # an empty file is to be seen, and removed, too

    def load(self, loaded: LoadedTurn, going: Callable[[], bool]) -> None:
        """Read the turns, the longest first, until one is whole and has forgotten no more than the request does."""
        for place in self._places:
            if not going():
                return
            turn = self._store.read(place, self._live.numbers[: place.length], self._most)
            if turn is not None and covers(self._live.forget, turn.forgotten):
                loaded.place, loaded.turn = place, turn
                return
