"""The requests of an engine that are in flight, by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from millpond.engine.completion import CompletionState
from millpond.engine.request_state import RequestState
from millpond.engine.scheduler_request import RequestStatus
from millpond.errors import OptionError


class RequestTable:
    """Requests that have been added and have not ended, in the order of arrival.

    Common prefixes of a planned batch are requests without answers, and are in the table too.
    """

    def __init__(self) -> None:
        self._states: dict[str, RequestState] = {}

    def __len__(self) -> int:
        """Return the number of requests in flight."""
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        """Iterate over the requests; copy them into a list where the loop ends some."""
        return iter(self._states.values())

    def __contains__(self, name: str) -> bool:
        """Return whether a request of this name is in flight."""
        return name in self._states

    def __getitem__(self, name: str) -> RequestState:
        """Return a request that is in flight."""
        return self._states[name]

    def get(self, name: str) -> RequestState | None:
        """Return a request by its name; None: none of this name is in flight."""
        return self._states.get(name)

    def holds(self, state: RequestState) -> bool:
        """Return whether this very request is in flight."""
        return self._states.get(state.request.request_id) is state

    def owner(self, completion: CompletionState) -> RequestState:
        """Return the request that an answer belongs to."""
        return self._states[completion.key[0]]

    def with_status(self, status: RequestStatus) -> list[RequestState]:
        """Return the requests that the scheduler has in this status."""
        return [state for state in self if state.scheduled.status is status]

    @property
    def unfinished(self) -> list[CompletionState]:
        """Answers of all requests that are not finished."""
        return [completion for state in self for completion in state.unfinished]

    def check_names(self, names: Sequence[str]) -> None:
        """Check the names of requests that are to be added together.

        Raises:
            OptionError: several requests have one name, or a request of this name is in flight.
        """
        for name, occurrences in Counter(names).items():
            if occurrences > 1:
                raise OptionError(f"{occurrences} requests of a batch are named {name!r}; give each a name of its own")
            if name in self:
                raise OptionError(f"request {name!r} is in flight already; give another name")

    def add(self, state: RequestState) -> None:
        """Add a request; its name must be free."""
        name = state.request.request_id
        assert name not in self._states, "names of requests are checked before they are added"
        self._states[name] = state

    def remove(self, state: RequestState) -> None:
        """Remove a request that is in flight."""
        del self._states[state.request.request_id]
