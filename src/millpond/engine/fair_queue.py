"""Fair queueing: service per client, so that the requests of one do not delay those of another.

Service is counted in tokens, those of prompts that were read and those that were generated. Whoever has had less goes
first (virtual token counters, Sheng et al. 2024). Time without requests earns nothing: who comes, or comes back, begins
where the least served of those who are here stands.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Clients without requests that are remembered before those who owe nothing are forgotten.
IDLE = 1024


@dataclass(slots=True, eq=False)
class ClientService:
    """Service that one client has had.

    Attributes:
        number: given when it came; the lowest goes first where two have had the same.
        served: tokens. jobs: that are not finished.
    """

    number: int
    served: int = 0
    jobs: int = 0

    @property
    def rank(self) -> tuple[int, int]:
        """The lowest goes first."""
        return self.served, self.number


class FairQueue:
    """All who have requests, and those whose service still counts against them."""

    def __init__(self) -> None:
        self._known: dict[str, ClientService] = {}
        self._came = 0

    def __len__(self) -> int:
        return len(self._known)

    def enter(self, name: str) -> ClientService:
        """One more job of a client."""
        client = self._known.get(name)
        if client is None or not client.jobs:
            least = min((one.served for one in self._known.values() if one.jobs), default=0)
            if len(self._known) >= IDLE:
                self._known = {key: one for key, one in self._known.items() if one.jobs or one.served > least}
            client = ClientService(self._came, max(least, client.served if client is not None else 0))
            self._known[name] = client
            self._came += 1
        client.jobs += 1
        return client

    def leave(self, client: ClientService) -> None:
        """Remove one job. After the last job of all, every client's service is reset."""
        client.jobs -= 1
        if not client.jobs and not any(one.jobs for one in self._known.values()):
            self._known.clear()
