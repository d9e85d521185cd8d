"""Fairness between clients: service per client, and a bound on the time that prompts add to decoding steps."""

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


#: Weight of the newest step in the mean of those without the others.
_NEWEST = 0.2
#: What is left of that mean after each step with guests: it is taken again before long.
_FADES = 0.95
#: Seconds that are owed for each that guests add. What is not measured, such as answers that decode too, comes on top.
PAID_BACK = 2.0


class Pace:
    """What guests owe.

    Attributes:
        owed: seconds that must pass before they take part in a step again.
    """

    def __init__(self) -> None:
        self.owed = 0.0
        self._alone = 0.0  # seconds of a step without them in which nothing is read

    def begin_anew(self) -> None:
        """Others decode now: how long their steps take is not known."""
        self._alone = 0.0

    @property
    def may_go(self) -> bool:
        """Whether they take part in the next step."""
        return self.owed <= 0

    def with_them(self, seconds: float) -> None:
        """A step in which they took part."""
        self.owed += PAID_BACK * max(seconds - self._alone, 0.0)
        self._alone *= _FADES

    def without_them(self, seconds: float, reads: bool) -> None:
        """A step in which they did not, whether they wanted to or were not there; or in which prompts were read."""
        self.owed = max(self.owed - seconds, 0.0)
        if not reads:
            self._alone += (seconds - self._alone) * (_NEWEST if self._alone else 1.0)
