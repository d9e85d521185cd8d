"""Fairness between clients: service per client, and a bound on the time that prompts add to decoding steps."""

from __future__ import annotations

from dataclasses import dataclass

#: Clients that are remembered before those without requests and without extra service are forgotten.
IDLE = 1024


@dataclass(slots=True, eq=False)
class ClientService:
    """Service that one client has received.

    Attributes:
        number: Order of arrival; the lowest goes first among clients with equal service.
        served: Tokens of service.
        num_requests: Requests that are not finished.
    """

    number: int
    served: int = 0
    num_requests: int = 0

    @property
    def queue_key(self) -> tuple[int, int]:
        """Sort key in the queue; the lowest goes first."""
        return self.served, self.number


class FairQueue:
    """Clients that have requests, and those whose service still counts against them.

    The client with the least service goes first (virtual token counters, Sheng et al. 2024). Idle clients earn no
    credit: one that arrives or returns starts at the counter of the least served active client.
    """

    def __init__(self) -> None:
        self._clients: dict[str, ClientService] = {}
        self._came = 0

    def __len__(self) -> int:
        return len(self._clients)

    def add_request(self, name: str) -> ClientService:
        """Add one request of a client."""
        client = self._clients.get(name)
        if client is None or not client.num_requests:
            min_served = min(
                (known_client.served for known_client in self._clients.values() if known_client.num_requests), default=0
            )
            if len(self._clients) >= IDLE:
                self._clients = {
                    key: known_client
                    for key, known_client in self._clients.items()
                    if known_client.num_requests or known_client.served > min_served
                }
            client = ClientService(self._came, max(min_served, client.served if client is not None else 0))
            self._clients[name] = client
            self._came += 1
        client.num_requests += 1
        return client

    def remove_request(self, client: ClientService) -> None:
        """Remove one request. After the last request of all, every client's service is reset."""
        client.num_requests -= 1
        if not client.num_requests and not any(known_client.num_requests for known_client in self._clients.values()):
            self._clients.clear()


#: Weight of the newest step in the mean of the steps without throttled requests.
_NEWEST = 0.2
#: Share of that mean which remains after each step with throttled requests: it is measured again before long.
_FADES = 0.95
#: Seconds that are owed for each second that throttled requests add. What is not measured, such as answers that decode
#: too, comes on top.
PAID_BACK = 2.0


class StepThrottle:
    """Debt of throttled requests.

    The time that they add to steps becomes a debt. They run again once steps without them have paid it back; decoding
    clients keep about two thirds of their speed.

    Attributes:
        owed: Seconds that must pass before throttled requests take part in a step again.
    """

    def __init__(self) -> None:
        self.owed = 0.0
        self._alone = 0.0  # seconds of a step without them in which nothing is read

    def reset(self) -> None:
        """Forget how long steps take: other answers decode now."""
        self._alone = 0.0

    @property
    def allows_throttled(self) -> bool:
        """Whether throttled requests take part in the next step."""
        return self.owed <= 0

    def charge(self, seconds: float) -> None:
        """Record the seconds of a step in which throttled requests took part."""
        self.owed += PAID_BACK * max(seconds - self._alone, 0.0)
        self._alone *= _FADES

    def credit(self, seconds: float, reads: bool) -> None:
        """Record the seconds of a step that pay the debt back.

        Throttled requests took no part in it, waiting or absent; or prompts were read.

        Args:
            seconds: Time of the step.
            reads: Whether prompts were read in it.
        """
        self.owed = max(self.owed - seconds, 0.0)
        if not reads:
            self._alone += (seconds - self._alone) * (_NEWEST if self._alone else 1.0)
