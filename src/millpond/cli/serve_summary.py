"""Summary of a server at its start: the model, its memory and cache, its addresses, and whether it needs a key."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from millpond.cli.console import size

if TYPE_CHECKING:
    from millpond.server.llm_protocol import ServedLLM
    from millpond.server.settings import ServerSettings

#: Addresses that stand for every one of a machine.
_EVERY = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def summary(llm: ServedLLM, settings: ServerSettings, host: str, port: int) -> list[str]:
    """Return the lines that a server prints when it listens.

    Args:
        llm: The model.
        settings: Settings of the server.
        host: Address on which it listens.
        port: Port that it has.
    """
    stats, cache = llm.stats(), llm.cache
    own = _EVERY.get(host, host)
    address = f"http://{f'[{own}]' if ':' in own else own}:{port}"
    weights = f", {size(stats.weight_bytes)} of weights" if stats.weight_bytes else ""
    room = "no limit (--kv-memory)" if stats.kv_limit is None else f"at most {size(stats.kv_limit)}"
    kept = [f"method {cache.method}" if cache.method else "", f"budget {cache.budget}" if cache.budget else ""]
    kept += [f"format {cache.codec or 'of the model'}"]
    keys = f"one of {len(settings.api_keys)} is needed" if settings.api_keys else "none is needed"
    everywhere = ", and at every other address of this machine" if host in _EVERY else ""
    return [
        f"model    {llm.model_name}{weights}, context of {llm.context_length:,} tokens",
        f"cache    {', '.join(part for part in kept if part)}; memory for keys and values: {room}",
        f"OpenAI   {address}/v1{everywhere}",
        f"others   {address} (Anthropic's clients, llama.cpp's /infill; /openapi.json describes all)",
        f"page     {address}/",
        f"key      {keys}",
    ]


def show_requests() -> None:
    """Write a line per request to stderr from now on."""
    from millpond.server.request_log import LOG

    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    LOG.handlers[:] = [lines]
    LOG.setLevel(logging.INFO)
    LOG.propagate = False
