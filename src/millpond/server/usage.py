"""Usage of an answer as OpenAI counts tokens, figures as `millpond`, and log probabilities.

Two objects have the name `millpond`: `usage.millpond` has the figures of the whole request (`usage`, the schema
`AnswerFigures`), `choices[].millpond` those of one finished answer (`choice_figures`, the schema `ChoiceFigures`).
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import chain
from typing import Any

from millpond.engine.outputs import Completion, KVStats, RequestOutput, TokenLogprob


def usage(outputs: Sequence[RequestOutput], new_tokens: bool = True) -> dict[str, Any]:
    """Return the token counts of a whole answer; `new_tokens` off: none were requested."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    new = sum(len(c.token_ids) for output in outputs for c in output.completions) if new_tokens else 0
    by_prompt = [[c.kv for c in output.completions if c.kv is not None] for output in outputs]
    names = ("shared_tokens", "restored_tokens", "reused_tokens")
    cached = sum(max((getattr(kv, name) for kv in kvs), default=0) for kvs in by_prompt for name in names)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
        "millpond": sums(list(chain(*by_prompt))) | times(outputs) | _forgotten(outputs[0].completions[0]),
    }


def _forgotten(completion: Completion) -> dict[str, Any]:
    """Return the share of each message of a chat that a cache has lost, if it is requested."""
    shares = [
        {
            "message": number,
            "tokens": of.end - of.begin,
            "share": round(of.share, 4),
            "fewer_than_half": round(of.fewer_than_half, 4),
            "held": round(of.held, 4),
        }
        for number, of in enumerate(completion.forgotten)
    ]
    return {"forgotten": shares} if shares else {}


#: Numbers of a cache that are added up.
_SUMMED = (
    *("kv_bytes", "unused_bytes", "full_kv_bytes", "state_bytes", "evicted"),
    *("restored_tokens", "reused_tokens", "recomputed_tokens", "forgotten_tokens", "decoded_tokens"),
)


def sums(caches: Sequence[KVStats]) -> dict[str, Any]:
    """Return the numbers of several caches together; `held` is the mean."""
    return {
        **{name: sum(getattr(kv, name) for kv in caches) for name in _SUMMED},
        "exact": all(kv.exact for kv in caches),
        "seen": sum(kv.seen for kv in caches),
        "held": round(sum(kv.held for kv in caches) / len(caches), 2) if caches else 0.0,
    }


def times(outputs: Sequence[RequestOutput]) -> dict[str, float | None]:
    """Return seconds from the first arrival to the first start, the first token and the last."""
    began = min(output.times.arrived for output in outputs)

    def since(moments: list[float | None], pick: Any) -> float | None:
        reached = [moment for moment in moments if moment is not None]
        return round(pick(reached) - began, 6) if reached else None

    return {
        "queue_s": since([output.times.started for output in outputs], min),
        "first_token_s": since([output.times.first_token for output in outputs], min),
        "total_s": since([output.times.finished for output in outputs], max),
    }


def choice_figures(completion: Completion) -> dict[str, Any]:
    """Return what OpenAI's words lack of a finished answer: its true reason, and its cache."""
    stats: dict[str, Any] = {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}
    return stats | (sums([completion.kv]) if completion.kv is not None else {}) | _forgotten(completion)


def openai_reason(completion: Completion) -> str | None:
    """Return OpenAI's reason of an end; "length" for a deadline or a cancellation.

    OpenAI has no word for an answer that was cut off by these; "length" comes nearest.
    """
    return {"cancelled": "length", "deadline": "length"}.get(completion.finish_reason or "", completion.finish_reason)


#: The replacement for minus infinity, which JSON does not have; OpenAI's number.
_NEVER = -9999.0
_UTF8 = codecs.getincrementaldecoder("utf-8")


def for_completions(
    ids: Sequence[int], entries: Sequence[TokenLogprob | None], texts: Sequence[str], offset: int, text: str
) -> dict[str, Any]:
    """Return four parallel lists; None where a token has nothing before it.

    Where two tokens of one place read the same (pieces of a character, mostly), or one has no text, each is named by
    its id, so that a client that compares names compares tokens.

    Args:
        ids: Ids of the tokens.
        entries: Log probabilities of the tokens; None if there is none.
        texts: Texts of tokens without log probabilities.
        offset: Characters before the first token.
        text: Text that these tokens begin; a tokenizer may leave out the blank of a text's first token.
    """
    tokens: list[str] = []
    offsets: list[int] = []
    top: list[dict[str, float] | None] = []
    begun = _UTF8("replace")  # a character begins with the first of its tokens
    if texts and text and texts[0].startswith(" ") and not text.startswith(" "):
        offset -= 1
    for token_id, entry, alone in zip(ids, entries, texts, strict=True):
        offsets.append(max(offset, 0))
        if entry is None:
            tokens.append(alone)
            top.append(None)
            offset += len(alone)
            continue
        candidates = {i: (name or f"token_id:{i}", max(logprob, _NEVER)) for i, logprob, name in entry.top}
        candidates.setdefault(token_id, (entry.text or f"token_id:{token_id}", max(entry.logprob, _NEVER)))
        names = [name for name, _ in candidates.values()]
        shown = {i: name if names.count(name) == 1 else f"token_id:{i}" for i, (name, _) in candidates.items()}
        tokens.append(shown[token_id])
        top.append({shown[i]: logprob for i, (_, logprob) in candidates.items()})
        offset += len(begun.decode(entry.spelled))
    logprobs = [None if entry is None else max(entry.logprob, _NEVER) for entry in entries]
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}


def for_chat(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return one object per token, with the token's own bytes.

    Of a character that is spread over several tokens these are its part.
    """
    return {
        "content": [
            _item(entry.text, entry.logprob, entry.spelled)
            | {
                "top_logprobs": [
                    _item(text, logprob, spelled)
                    for (_, logprob, text), spelled in zip(entry.top, entry.top_spelled, strict=True)
                ]
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _item(text: str, logprob: float, spelled: bytes) -> dict[str, Any]:
    return {"token": text, "logprob": max(logprob, _NEVER), "bytes": list(spelled)}
