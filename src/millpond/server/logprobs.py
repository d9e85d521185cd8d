"""Log probabilities in OpenAI's two shapes."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from millpond.engine.outputs import TokenLogprob

#: The replacement for minus infinity, which JSON does not have; OpenAI's number.
_NEVER = -9999.0
_UTF8 = codecs.getincrementaldecoder("utf-8")


def for_completions(
    ids: Sequence[int], found: Sequence[TokenLogprob | None], texts: Sequence[str], offset: int, text: str
) -> dict[str, Any]:
    """Four parallel lists; None where a token has nothing before it.

    Where two tokens of one place read the same (pieces of a character, mostly), or one has no text, each is named by
    its id, so that a client that compares names compares tokens.

    Args:
        texts: of tokens without log probabilities. offset: characters before the first token. text: that these tokens
            begin; a tokenizer may leave out the blank of a text's first token.
    """
    tokens: list[str] = []
    offsets: list[int] = []
    top: list[dict[str, float] | None] = []
    begun = _UTF8("replace")  # a character begins with the first of its tokens
    if texts and text and texts[0].startswith(" ") and not text.startswith(" "):
        offset -= 1
    for token_id, entry, alone in zip(ids, found, texts, strict=True):
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
    logprobs = [None if entry is None else max(entry.logprob, _NEVER) for entry in found]
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}


def for_chat(found: Sequence[TokenLogprob]) -> dict[str, Any]:
    """One object per token, with the token's own bytes: of a character that is spread over several, its part."""
    return {
        "content": [
            _item(entry.text, entry.logprob, entry.spelled)
            | {
                "top_logprobs": [
                    _item(text, logprob, spelled)
                    for (_, logprob, text), spelled in zip(entry.top, entry.top_spelled, strict=True)
                ]
            }
            for entry in found
        ],
        "refusal": None,
    }


def _item(text: str, logprob: float, spelled: bytes) -> dict[str, Any]:
    return {"token": text, "logprob": max(logprob, _NEVER), "bytes": list(spelled)}
