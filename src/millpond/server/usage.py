"""Usage of an answer: tokens as OpenAI counts them, and the cache's size as `millpond`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millpond.engine.outputs import Completion, KVStats, RequestOutput


def usage(outputs: Sequence[RequestOutput], new_tokens: bool = True) -> dict[str, Any]:
    """The token counts of a whole answer; `new_tokens` off: none were requested."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    new = sum(len(c.token_ids) for output in outputs for c in output.completions) if new_tokens else 0
    held = [c.kv for output in outputs for c in output.completions if c.kv is not None]
    shared = sum(max((c.kv.shared_tokens for c in o.completions if c.kv is not None), default=0) for o in outputs)
    restored = sum(max((c.kv.restored_tokens for c in o.completions if c.kv is not None), default=0) for o in outputs)
    reused = sum(max((c.kv.reused_tokens for c in o.completions if c.kv is not None), default=0) for o in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": shared + restored + reused},
        "millpond": sums(held) | times(outputs) | _forgotten(outputs[0].completions[0]),
    }


def _forgotten(completion: Completion) -> dict[str, Any]:
    """The share of each message of a chat that the cache of an answer has lost, if the request wants to know."""
    found = [
        {
            "message": number,
            "tokens": of.end - of.begin,
            "share": round(of.share, 4),
            "fewer_than_half": round(of.fewer_than_half, 4),
            "held": round(of.held, 4),
        }
        for number, of in enumerate(completion.forgotten)
    ]
    return {"forgotten": found} if found else {}


def sums(held: Sequence[KVStats]) -> dict[str, Any]:
    """Of several caches together; `held` is the mean."""
    return {
        "kv_bytes": sum(kv.kv_bytes for kv in held),
        "unused_bytes": sum(kv.unused_bytes for kv in held),
        "full_kv_bytes": sum(kv.full_kv_bytes for kv in held),
        "state_bytes": sum(kv.state_bytes for kv in held),
        "evicted": sum(kv.evicted for kv in held),
        "restored_tokens": sum(kv.restored_tokens for kv in held),
        "reused_tokens": sum(kv.reused_tokens for kv in held),
        "recomputed_tokens": sum(kv.recomputed_tokens for kv in held),
        "forgotten_tokens": sum(kv.forgotten_tokens for kv in held),
        "exact": all(kv.exact for kv in held),
        "seen": sum(kv.seen for kv in held),
        "held": round(sum(kv.held for kv in held) / len(held), 2) if held else 0.0,
    }


def times(outputs: Sequence[RequestOutput]) -> dict[str, float | None]:
    """Seconds from the first arrival to the first start, the first token and the last."""
    began = min(output.times.arrived for output in outputs)

    def since(moments: list[float | None], pick: Any) -> float | None:
        known = [moment for moment in moments if moment is not None]
        return round(pick(known) - began, 6) if known else None

    return {
        "queue_s": since([output.times.started for output in outputs], min),
        "first_token_s": since([output.times.first_token for output in outputs], min),
        "total_s": since([output.times.finished for output in outputs], max),
    }


def choice_stats(completion: Completion) -> dict[str, Any]:
    """What OpenAI's words do not say of one finished answer: the true reason of its end, and its cache."""
    found: dict[str, Any] = {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}
    return found | (sums([completion.kv]) if completion.kv is not None else {}) | _forgotten(completion)


def openai_reason(completion: Completion) -> str | None:
    """OpenAI has no word for an answer that was cut off by a deadline or a cancellation; "length" comes nearest."""
    return {"cancelled": "length", "deadline": "length"}.get(completion.finish_reason or "", completion.finish_reason)
