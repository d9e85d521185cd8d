"""Settings of a server: access, limits of requests, and time limits, checked once."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_network

from millpond.budget import parse_bytes
from millpond.errors import OptionError
from millpond.images.limits import MAX_IMAGE_BYTES, MAX_IMAGES, MAX_PIXELS, ImageLimits
from millpond.setting import check_settings, setting

#: Formats of calls of tools by name: "auto" is what the chat template writes, "none" leaves calls in the text.
PARSERS = ("auto", "hermes", "llama3", "mistral", "none")
#: An origin as browsers write it: no path, and no capital letters.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@A-Z,*]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Access to a server, and limits of its requests.

    Raises:
        OptionError: a value out of its range.
    """

    option_files: Mapping[str, str | os.PathLike[str]] = setting(
        {},
        "A file that options of requests may name, by this name; may be repeated. No other file can be named.",
        flag="--option-file",
        metavar="NAME=PATH",
    )
    api_keys: tuple[str, ...] = setting(
        (),
        "A key that clients must send; may be repeated.",
        more="As `Authorization: Bearer KEY`; without keys none is needed.",
        flag="--api-key",
        variable="MILLPOND_API_KEYS",
        repr=False,
    )
    operator_key: str | None = setting(
        None,
        "The key that lists and drains workers under /cluster.",
        more="Without it, nobody can if there are API keys; without API keys anyone who reaches the server can list "
        "workers.",
        variable="MILLPOND_OPERATOR_KEY",
        default_text="none",
        repr=False,
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "A name by which clients may call the server, in addition to localhost; may be repeated.",
        more="Without any, every name will do, except for a server without keys that listens on loopback.",
        flag="--allow-host",
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        "An origin of web pages whose scripts may call the server (https://example.org), or '*'; may be repeated.",
        flag="--cors-origin",
        metavar="ORIGIN",
        default_text="none",
    )
    trusted_proxies: tuple[str, ...] = setting(
        (),
        "A proxy, or a network of proxies, whose X-Forwarded-For names the client; may be repeated.",
        flag="--trusted-proxy",
        metavar="ADDRESS",
        default_text="none; clients without keys are then identified by the addresses that they connect from",
    )
    priority_limits: Mapping[str, int] = setting(
        {},
        "The lowest (best) priority for requests with a key; without KEY=, for all others. Default: 0. May be "
        "repeated.",
        more='The key "" stands for all others, so that no client overtakes others by itself.',
        flag="--priority-limit",
        metavar="[KEY=]N",
        variable="MILLPOND_PRIORITY_LIMITS",
        repr=False,
    )
    max_queue: int = setting(
        256,
        "Prompts that the server's admission control lets wait; beyond it: 429.",
        more="An eighth of it is reserved for clients without requests in flight.",
        at_least=1,
    )
    max_tokens: int | None = setting(
        None, "New tokens per answer, at most.", at_least=1, default_text="what the context holds"
    )
    max_body_bytes: int = setting(
        16 * 2**20, "Size of a request's body, at most.", flag="--max-body", parse=parse_bytes, default_text="16MiB"
    )
    max_body_items: int = setting(
        2**17, "Values in a body, at most; 1/8 as many keys, 1/16 as many arrays and objects.", at_least=16
    )
    max_bytes_under_way: int = setting(
        256 * 2**20,
        "Size of the bodies of all requests in flight, at most; beyond it: 503.",
        flag="--max-bodies",
        parse=parse_bytes,
        default_text="256MiB",
    )
    max_images: int = setting(MAX_IMAGES, "Images of a chat, at most.", more="For models that take images.", at_least=0)
    max_image_bytes: int = setting(
        MAX_IMAGE_BYTES,
        "Size of an image's file, at most.",
        more="It is sent in base64, which takes a third more of the body.",
        flag="--max-image",
        parse=parse_bytes,
        default_text="8MiB",
    )
    max_image_pixels: int = setting(MAX_PIXELS, "Pixels of an image, at most: its width times its height.", at_least=1)
    max_connections: int = setting(
        512, "Most connections; beyond it, the connection that keeps the server waiting longest is closed.", at_least=1
    )
    header_timeout_s: float = setting(
        10.0, "Seconds in which the header of a request must arrive.", flag="--header-timeout", above=0, finite=True
    )
    body_timeout_s: float = setting(
        30.0, "Seconds in which its body must arrive.", flag="--body-timeout", above=0, finite=True
    )
    write_timeout_s: float = setting(
        60.0,
        "Seconds after which a client that does not read its answer is disconnected.",
        flag="--write-timeout",
        above=0,
        finite=True,
    )
    timeout_s: float | None = setting(
        None, "Seconds after which a request ends with what it has.", flag="--timeout", above=0, default_text="none"
    )
    drain_s: float = setting(
        30.0,
        "Seconds that requests have to finish when the server is stopped.",
        flag="--drain",
        at_least=0,
        finite=True,
    )
    step_limit_s: float = setting(
        120.0,
        "Seconds that a step of the engine may take; beyond it /health answers 503.",
        flag="--step-limit",
        above=0,
        finite=True,
    )
    tool_parser: str = setting(
        "auto",
        "How the model writes calls of tools: hermes, llama3, mistral, auto (as its chat template does), or none "
        "(calls stay in the text).",
        choices=PARSERS,
    )

    @property
    def image_limits(self) -> ImageLimits:
        """Limits of the images of a chat."""
        return ImageLimits(count=self.max_images, n_bytes=self.max_image_bytes, pixels=self.max_image_pixels)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.max_bytes_under_way < self.max_body_bytes:
            raise OptionError(
                f"max_bytes_under_way={self.max_bytes_under_way} is less than max_body_bytes={self.max_body_bytes}: "
                "raise it, or lower that"
            )
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
