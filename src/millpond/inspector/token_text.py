"""The text of each token of a prompt and its continuation, so that all pieces joined are the text."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from millpond.errors import OptionError

#: Tokens before one that decide how it is decoded: a space, or the first bytes of its character.
CONTEXT = 6


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt as a model reads it.

    Attributes:
        ids: Ids of its tokens.
        pieces: Their texts; white space belongs to the token that follows it.
        special: Indices of tokens that stand for no text, such as <bos>; their piece is their name.
    """

    ids: tuple[int, ...]
    pieces: tuple[str, ...]
    special: tuple[int, ...] = ()


def encode_pieces(tokenizer: PreTrainedTokenizerBase, text: str, special_tokens: bool = True) -> Encoded:
    """Encode `text` as tokens, each with its own part of the text.

    Args:
        tokenizer: Tokenizer of the model.
        text: Text of the prompt.
        special_tokens: Add what the tokenizer puts around a text; False where a chat template has done so.

    Raises:
        OptionError: no token comes of the text.
    """
    if not tokenizer.is_fast:
        ids = tokenizer(text, add_special_tokens=special_tokens)["input_ids"]
        return _checked(Encoded(tuple(ids), tuple(continuation(tokenizer, ids, 0)), _special(tokenizer, ids)))
    coded = tokenizer(text, add_special_tokens=special_tokens, return_offsets_mapping=True)
    ids, at = coded["input_ids"], 0
    pieces: list[str] = []
    special: list[int] = []
    for index, (begin, end) in enumerate(coded["offset_mapping"]):
        if begin == end and ids[index] in tokenizer.all_special_ids:
            special.append(index)
            pieces.append(str(tokenizer.convert_ids_to_tokens(ids[index])))
            continue
        pieces.append(text[at : max(at, end)])  # bytes of one character share its offsets: the first one shows it
        at = max(at, end)
    return _checked(Encoded(tuple(ids), tuple(pieces), tuple(special)))


def continuation(tokenizer: PreTrainedTokenizerBase, ids: list[int], start: int) -> list[str]:
    """Return the texts of the tokens from `start` on.

    A character of several tokens is shown by its last one.
    """
    pieces, begin = [], max(0, start - CONTEXT)
    previous = _decode(tokenizer, ids[begin:start])
    for end in range(start + 1, len(ids) + 1):
        now = _decode(tokenizer, ids[begin:end])
        whole = not now.endswith("\N{REPLACEMENT CHARACTER}")
        pieces.append(now[len(previous) :] if whole else "")
        if whole:
            begin = max(begin, end - CONTEXT)
            previous = _decode(tokenizer, ids[begin:end])
    return pieces


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def _special(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> tuple[int, ...]:
    return tuple(index for index, token in enumerate(ids) if token in tokenizer.all_special_ids)


def _checked(coded: Encoded) -> Encoded:
    if not coded.ids:
        raise OptionError("the prompt has no token")
    return coded
