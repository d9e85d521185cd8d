"""Settings of a server: access, limits of requests, and time limits, checked once."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_network

from millpond.errors import OptionError

#: An origin as browsers write it: no path, and no capital letters.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@A-Z,*]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Access to a server, and limits of its requests.

    Attributes:
        api_keys: keys of which each request must send one as `Authorization: Bearer KEY`; empty: no key is needed.
        operator_key: of the operator, which alone opens `/cluster`, where workers are listed and drained; None: with
            `api_keys` nothing does, and without them anyone who reaches the server lists workers.
        priority_limits: lowest (best) priority of a key's requests, by key; by "" that of all others. The default is
            0, so that no client overtakes others by its own word.
        allowed_hosts: names by which requests may call the server, in addition to those of loopback; empty: any,
            except for a server without keys that listens on loopback.
        cors_origins: origins of web pages whose scripts may call the server, such as "https://chat.example.org"; "*":
            those of any page.
        trusted_proxies: addresses or networks of proxies whose X-Forwarded-For names the client; empty: the client is
            the address that connects, whatever its headers say.
        max_queue: prompts that wait for the engine, at most; beyond it requests are refused with 429. An eighth of it
            is reserved for clients without requests in flight.
        max_tokens: new tokens per answer, at most; None: as many as the model's context holds.
        max_body_bytes: size of a request's body, at most.
        max_body_items: values in a body, at most; an eighth as many keys, a sixteenth as many arrays and objects.
        max_bytes_under_way: size of the bodies of all requests in flight, at most; beyond it: 503.
        max_connections: beyond it the connection is closed that has kept the server waiting longest.
        header_timeout_s: seconds in which a request's header must arrive.
        body_timeout_s: seconds in which its body must arrive.
        write_timeout_s: seconds for which a client may read nothing of its answer.
        timeout_s: seconds after which a request ends with what it has; None: never.
        drain_s: seconds that running requests have to finish at shutdown.
        step_limit_s: seconds that one step of the engine may take; beyond it the server is not healthy (503).
        tool_parser: format of the model's tool calls: hermes, llama3, mistral; auto: as its chat template does; none:
            calls stay in the text.
        option_files: files that options of requests may name, by name.

    Raises:
        OptionError: a value out of its range.
    """

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    operator_key: str | None = field(default=None, repr=False)
    priority_limits: Mapping[str, int] = field(default_factory=dict, repr=False)
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    trusted_proxies: tuple[str, ...] = ()
    max_queue: int = 256
    max_tokens: int | None = None
    max_body_bytes: int = 16 * 2**20
    max_body_items: int = 2**17
    max_bytes_under_way: int = 256 * 2**20
    max_connections: int = 512
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    timeout_s: float | None = None
    drain_s: float = 30.0
    step_limit_s: float = 120.0
    tool_parser: str = "auto"
    option_files: Mapping[str, str | os.PathLike[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_queue", "max_tokens", "max_body_bytes", "max_body_items", "max_connections"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name}={value}: must be at least 1")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise OptionError(f"timeout_s={self.timeout_s}: must be above 0; leave it out for no limit")
        for name in ("header_timeout_s", "body_timeout_s", "write_timeout_s", "step_limit_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise OptionError(f"{name}={getattr(self, name)}: must be above 0, and not without end")
        if self.max_bytes_under_way < self.max_body_bytes:
            raise OptionError(
                f"max_bytes_under_way={self.max_bytes_under_way} is less than max_body_bytes={self.max_body_bytes}: "
                "raise it, or lower that"
            )
        if not 0 <= self.drain_s < math.inf:
            raise OptionError(f"drain_s={self.drain_s}: must be 0 or more, and not without end")
        if any(not key.strip() for key in self.api_keys):
            raise OptionError("an API key is empty; leave it out for a server without keys")
        if self.operator_key is not None and not self.operator_key.strip():
            raise OptionError("the operator's key is empty; leave it out for a server without one")
        if self.operator_key in self.api_keys:
            raise OptionError(
                "the operator's key is an API key too, so whoever has that could drain workers; choose another"
            )
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                rule = (
                    "must be '*', or a scheme, a host and a port as a browser sends them, such as https://example.org"
                )
                raise OptionError(f"origin {origin[:200]!r}: {rule}; without a path or a slash at the end")
        for proxy in self.trusted_proxies:
            try:
                ip_network(proxy)
            except ValueError as error:
                rule = "must be an address, such as 10.0.0.1, or a network, such as 10.0.0.0/24"
                raise OptionError(f"trusted proxy {proxy!r}: {rule} ({error})") from None
        if unknown := [key for key in self.priority_limits if key and key not in self.api_keys]:
            raise OptionError(f"priority_limits: {len(unknown)} of its keys are not among api_keys")
