"""Identity of clients: keys and addresses, their limits and prefix scope, and the operator's key."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace
from ipaddress import IPv6Address, ip_address, ip_network

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import Scope

from millpond.engine.request import Request
from millpond.server.errors import ApiError
from millpond.server.settings import ServerSettings

#: Bits of an IPv6 address that say whose it is; with the rest one machine could pose as many.
_IPV6_NETWORK = 64


@dataclass(frozen=True, slots=True)
class Client:
    """A client of the server.

    Attributes:
        name: Keyed hash of its key, or else its address.
        best_priority: Lowest priority that it may ask for.
        salt: Salt of its shared prompts; empty where it shares with all clients.
    """

    name: str
    best_priority: int
    salt: str


class ClientRegistry:
    """Tells clients apart: by API key where the server has some, else by address.

    No key is kept in what it makes.

    Args:
        settings: Settings of the server.
        secret: Secret of the hashes of keys and salts, where they shall be the same after a restart; None: a new one.
    """

    def __init__(self, settings: ServerSettings, secret: bytes | None = None) -> None:
        self._secret = secrets.token_bytes(32) if secret is None else secret
        self._keyed = bool(settings.api_keys)
        self._best = {self._hash(key): best for key, best in settings.priority_limits.items() if key}
        self._usual = settings.priority_limits.get("", 0)

    def of(self, http: HTTPConnection) -> Client:
        """Return the sender of a request that has passed the checks."""
        if self._keyed:
            name = self._hash(key_of(http.scope).decode("utf-8", "surrogateescape"))
            return Client(name, self._best.get(name, self._usual), name)
        return Client(_network(http.client.host if http.client is not None else ""), self._usual, "")

    def with_client(self, client: Client, requests: Iterable[Request]) -> list[Request]:
        """Return these requests as `client` sends them.

        Raises:
            ApiError: 403, a better priority than the client may ask for.
        """
        of_client = []
        for request in requests:
            if request.priority < client.best_priority:
                rule = f"lower goes first, and you may ask for {client.best_priority} at the lowest"
                message = f"priority={request.priority}: {rule}; the operator sets that with --priority-limit"
                raise ApiError(403, message, "priority_not_allowed", "millpond.priority")
            of_client.append(replace(request, client=client.name, cache_salt=self.salt(client, request.cache_salt)))
        return of_client

    def salt(self, client: Client, cache_salt: str | None) -> str | None:
        """Return the salt of a client's requests with this `cache_salt`.

        None: they share with all that have none.
        """
        return self._hash(client.salt, cache_salt or "") if client.salt or cache_salt else None

    def _hash(self, *parts: str) -> str:
        digest = hashlib.blake2b(key=self._secret, digest_size=16)
        for part in parts:
            coded = part.encode("utf-8", "surrogatepass")
            digest.update(len(coded).to_bytes(8, "little") + coded)
        return digest.hexdigest()


def key_of(scope: Scope) -> bytes:
    """Return the API key of a request as it was sent, empty if there is none.

    It is a bearer's of OpenAI's clients; of Anthropic's it is often in a header of its own.
    """
    headers = Headers(scope=scope)
    kind, _, key = headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer":
        key = headers.get("x-api-key", "")
    return key.strip().encode("latin-1")  # how headers are decoded


def _network(host: str) -> str:
    """Return the part of an address that tells clients apart."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, IPv6Address):
        mapped = address.ipv4_mapped
        return str(mapped or ip_network((address, _IPV6_NETWORK), strict=False))
    return host


class OperatorKey:
    """The key of a server's operator.

    Args:
        key: The key; None: there is none.
        keyed: Whether the server has API keys.
    """

    def __init__(self, key: str | None, *, keyed: bool) -> None:
        self._key = None if key is None else key.encode()
        self._keyed = keyed

    def matches(self, scope: Scope) -> bool:
        """Whether a request has it; the time that this takes does not depend on what it has."""
        return self._key is not None and hmac.compare_digest(key_of(scope), self._key)

    def check(self, scope: Scope, *, changes: bool) -> None:
        """Refuse a request that may not see this server's workers, or drain them with `changes`.

        Raises:
            ApiError: 403, another key than the operator's, or none is set. A server without any keys lists its workers
                to anyone who reaches it, and lets no one drain them.
        """
        if self._key is None:
            if self._keyed or changes:
                raise ApiError(
                    403,
                    "workers are looked after by the operator, and this server has no operator's key: start it with "
                    "--operator-key, or with MILLPOND_OPERATOR_KEY in its environment",
                    "needs_operator_key",
                )
        elif not self.matches(scope):
            message = "workers are looked after by the operator: send 'Authorization: Bearer KEY' with that key"
            raise ApiError(403, message, "wrong_operator_key")


def of_operator(path: str) -> bool:
    """Whether a path is one of the routes that the operator's key opens."""
    return path == "/cluster" or path.startswith("/cluster/")
