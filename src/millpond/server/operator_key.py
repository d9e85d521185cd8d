"""OperatorKey: the key that opens the routes under `/cluster`, which API keys do not."""

from __future__ import annotations

import hmac

from starlette.types import Scope

from millpond.server.errors import ApiError
from millpond.server.identity import key_of


class OperatorKey:
    """The key of a server's operator.

    Args:
        key: the key; None: there is none. keyed: whether the server has API keys.
    """

    def __init__(self, key: str | None, *, keyed: bool) -> None:
        self._key = None if key is None else key.encode()
        self._keyed = keyed

    def matches(self, scope: Scope) -> bool:
        """Whether a request has it; the time that this takes does not depend on what it has."""
        return self._key is not None and hmac.compare_digest(key_of(scope), self._key)

    def check(self, scope: Scope, *, changes: bool) -> None:
        """Refuse a request that may not see, or with `changes` not drain, the workers of this server.

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
