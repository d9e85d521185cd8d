"""Breakpoints of a completion's prompt: `millpond.breakpoints`, in characters of a text or in tokens."""

from __future__ import annotations

from collections.abc import Sequence

from millpond.server.errors import ApiError
from millpond.server.service import Service

BREAKPOINTS = "millpond.breakpoints"


def refuse_breakpoints(wanted: object, way_out: str) -> None:
    """
    Raises:
        ApiError: `millpond.breakpoints` is given where there is no prompt of a completion.
    """
    if wanted is not None:
        raise _refused(f"millpond.breakpoints goes with the one prompt of a completion; {way_out}")


async def prompt_breakpoints(
    service: Service,
    places: Sequence[int],
    prompts: Sequence[tuple[int, ...]],
    texts: Sequence[str | None],
    shared: bool,
) -> tuple[int, ...]:
    """Numbers of tokens of the only prompt of a body; a token that a place divides lies behind it.

    Args:
        places: as the client gave them. texts: of each prompt, None where it came as tokens.
        shared: whether other prompts can go on from this one: it has no chunks, and no log probabilities of its own.

    Raises:
        ApiError: several prompts, places that leave the prompt, or nothing that could go on from them.
    """
    if len(prompts) != 1:
        raise _refused("millpond.breakpoints goes with one prompt; send a request for each")
    if not shared:
        raise _refused("a prompt with chunks, or with echo and logprobs, is not shared: leave millpond.breakpoints out")
    if service.llm.stats().prefix is None:
        raise _refused("this server keeps no prompts (--prefix-cache), so none goes on: leave millpond.breakpoints out")
    (ids,), (text,) = prompts, texts
    length, unit = (len(ids), "tokens") if text is None else (len(text), "characters")
    for place in places:
        if not 1 <= place <= length:
            raise _refused(f"breakpoint {place} must be a number of {unit} from 1 to the prompt's {length}")
    if text is None:
        return tuple(sorted(set(places)))
    inner = [place for place in places if place < length]
    found = await service.tokens.tokens_before(text, ids, inner, BREAKPOINTS) if inner else ()
    return tuple(sorted({*found, *([len(ids)] if len(inner) < len(places) else ())} - {0}))


def _refused(message: str) -> ApiError:
    return ApiError(400, message, "invalid_value", BREAKPOINTS)
