"""Files of stored turns as requests wait for them."""

from __future__ import annotations

from collections.abc import Callable

from millpond.cache.state.dropped_spans import covers
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
        store, ids, salt = self._store, live.numbers, live.request.cache_salt
        scopes, least = self._scopes(live), self._least(live)
        places: list[TurnPlace] = []
        most = [0]

        def size() -> int:
            known = [place for scope in scopes for place in store.known(salt, scope, ids) if place.length > least]
            places.extend(sorted(known, key=lambda place: place.length, reverse=True))
            most.append(max(map(store.size_of, places), default=0))
            return max(most[-1], 1) if places else 0  # an empty file is to be seen, and removed, too

        def load(loaded: LoadedTurn, going: Callable[[], bool]) -> None:
            for place in places:
                if not going():
                    return
                turn = store.read(place, ids[: place.length], most[-1])
                if turn is not None and covers(live.forget, turn.forgotten):
                    loaded.place, loaded.turn = place, turn
                    return

        return LoadOrder(size, load)

    def failed(self) -> None:
        """See `LoadSource`."""
        self._store.load_failed()
