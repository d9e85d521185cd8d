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
        served: tokens. num_requests: that are not finished.
    """

    number: int
    served: int = 0
    num_requests: int = 0

    @property
    def queue_key(self) -> tuple[int, int]:
        """The lowest goes first."""
        return self.served, self.number


class FairQueue:
    """All who have requests, and those whose service still counts against them."""

    def __init__(self) -> None:
        self._clients: dict[str, ClientService] = {}
        self._came = 0

    def __len__(self) -> int:
        return len(self._clients)

    def add_request(self, name: str) -> ClientService:
        """One more request of a client."""
        client = self._clients.get(name)
        if client is None or not client.num_requests:
            least = min((one.served for one in self._clients.values() if one.num_requests), default=0)
            if len(self._clients) >= IDLE:
                self._clients = {
                    key: one for key, one in self._clients.items() if one.num_requests or one.served > least
                }
            client = ClientService(self._came, max(least, client.served if client is not None else 0))
            self._clients[name] = client
            self._came += 1
        client.num_requests += 1
        return client

    def remove_request(self, client: ClientService) -> None:
        """Remove one request. After the last request of all, every client's service is reset."""
        client.num_requests -= 1
        if not client.num_requests and not any(one.num_requests for one in self._clients.values()):
            self._clients.clear()


#: Weight of the newest step in the mean of those without the others.
_NEWEST = 0.2
#: What is left of that mean after each step with throttled requests: it is taken again before long.
_FADES = 0.95
#: Seconds that are owed for each that throttled requests add. What is not measured, such as answers that decode too,
#: comes on top.
PAID_BACK = 2.0


class StepThrottle:
    """What throttled requests owe.

    Attributes:
        owed: seconds that must pass before they take part in a step again.
    """

    def __init__(self) -> None:
        self.owed = 0.0
        self._alone = 0.0  # seconds of a step without them in which nothing is read

    def reset(self) -> None:
        """Others decode now: how long their steps take is not known."""
        self._alone = 0.0

    @property
    def allows_throttled(self) -> bool:
        """Whether they take part in the next step."""
        return self.owed <= 0

    def charge(self, seconds: float) -> None:
        """A step in which they took part."""
        self.owed += PAID_BACK * max(seconds - self._alone, 0.0)
        self._alone *= _FADES

    def credit(self, seconds: float, reads: bool) -> None:
        """A step in which they did not, whether they wanted to or were not there; or in which prompts were read."""
        self.owed = max(self.owed - seconds, 0.0)
        if not reads:
            self._alone += (seconds - self._alone) * (_NEWEST if self._alone else 1.0)
