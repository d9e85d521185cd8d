"""Requests to a peer and its replies, one JSON object a line. Formats only; nothing is run here.

A request holds tokens, so that both sides read the very same prompt:

    id         names the request; a reply repeats it
    press      the peer's method, with options: "SnapKVPress:window_size=16"
    keep       entries per KV head after the opening; null for all. bytes: instead, of the whole sequence
    opening    tokens that are read, and after which the peer compresses
    questions  each with index, tokens, most (tokens of the answer), stop (texts), references; each goes on from a copy
    eos        tokens that end a text

and task, protocol, sample for readers. A reply holds id, peer, answers (each with tokens, or error), kept_share,
kv_bytes and full_kv_bytes as measured after the opening, and pretended_share where entries were only hidden; or an
error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millpond.budget import Budget
from millpond_lab.evals.decoding.batch import EncodedPrompt
from millpond_lab.evals.decoding.record import Cell
from millpond_lab.peer_process import PeerError


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply.

    Attributes:
        answers: by question: tokens, or the reason why there are none.
        kept_share, kv_bytes, full_kv_bytes: as in `Record`, really held.
        pretended_share: of the entries, what attention is let see where the others were only hidden.
    """

    answers: tuple[tuple[int, ...] | str, ...]
    kept_share: float
    kv_bytes: int
    full_kv_bytes: int
    pretended_share: float | None = None


def request_of(cell: Cell, prompt: EncodedPrompt, eos: frozenset[int], limit: int | None) -> dict[str, Any]:
    """The request for one prompt of a cell."""
    first = prompt.asked[0]
    return {
        "id": "|".join((cell.method, cell.budget, cell.protocol, cell.task, prompt.sample.id, str(first.index))),
        "press": cell.method,
        **_amount(cell.budget, len(prompt.opening)),
        "opening": list(prompt.opening),
        "questions": [
            {
                "index": asked.index,
                "tokens": list(asked.tokens),
                "most": most_tokens(prompt, place, limit),
                "stop": list(asked.question.stop),
                "references": list(asked.question.references),
            }
            for place, asked in enumerate(prompt.asked)
        ],
        "eos": sorted(eos),
        "task": cell.task,
        "protocol": cell.protocol,
        "sample": prompt.sample.id,
    }


def most_tokens(prompt: EncodedPrompt, place: int, limit: int | None) -> int:
    """Tokens that may be decoded for a question: the last one is not read, so it needs no position."""
    asked = prompt.asked[place]
    most = asked.question.max_new_tokens
    return most if limit is None else min(most, limit - len(prompt.opening) - len(asked.tokens) + 1)


def reply_of(request: Mapping[str, Any], line: Any) -> Reply:
    """The reply to a request.

    Raises:
        PeerError: the peer answered with an error, or not in its format.
    """
    if isinstance(line, dict) and "error" in line:
        raise PeerError(str(line["error"]))
    try:
        if line["id"] != request["id"]:
            raise PeerError(f"the reply is to {line['id']!r}, not to {request['id']!r}")
        answers = tuple(
            str(one["error"]) if "error" in one else tuple(int(token) for token in one["tokens"])
            for one in line["answers"]
        )
        pretended = line.get("pretended_share")
        reply = Reply(
            answers,
            float(line["kept_share"]),
            int(line["kv_bytes"]),
            int(line["full_kv_bytes"]),
            None if pretended is None else float(pretended),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise PeerError(f"not a reply: {type(error).__name__} {error}") from error
    if len(answers) != len(request["questions"]):
        raise PeerError(f"{len(answers)} answers to {len(request['questions'])} questions")
    return reply


def _amount(budget: str, length: int) -> dict[str, int | None]:
    """As many entries as Millpond keeps under the same budget."""
    if not budget:
        return {"keep": None}
    parsed = Budget.parse(budget)
    return {"bytes": int(parsed.amount)} if parsed.kind == "bytes" else {"keep": parsed.entries(length)}
