"""Facts as they stand in conversations: a name, a date, a code, a constant in a snippet, or an instruction.

Chats are drawn by a seed over texts in files (`draw_chats`, for the benchmark of that name); `draw_fact` is what the
tasks draw from too.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from millpond.errors import DataError
from millpond_lab.evals.data.data_files import read_text
from millpond_lab.evals.stated import stated

Message = dict[str, str]

#: Tokens of a chat; a word of these texts has about this many.
SHORTEST, LONGEST, TOKENS_PER_WORD = 500, 4000, 1.45
SYLLABLES = ("mar", "vel", "oko", "tin", "ras", "ulm", "bet", "dor", "lia", "fen", "gar", "ise", "nov", "pel", "quo")
MONTHS = ("January", "March", "April", "June", "August", "October", "November")
KINDS = ("name", "date", "code", "snippet", "instruction")
SYSTEM = "You are a helpful assistant. Answer from the text, in one short sentence."


@dataclass(frozen=True)
class ChatFact:
    """One fact.

    Attributes:
        kind: one of `KINDS`. told: the paragraph that states it; "" where the system message does.
        question: asks for it. states: what an answer that states it contains. system: the system message.
        begins: how an answer that states it begins, where one is begun for the model.
    """

    kind: str
    told: str
    question: str
    states: str
    system: str = SYSTEM
    begins: str = ""


@dataclass(frozen=True)
class FactChat:
    """One chat.

    Attributes:
        kind: of fact. messages: up to the question. states: what an answer that states the fact contains.
    """

    kind: str
    messages: tuple[Message, ...]
    states: str

    def is_stated_by(self, answer: str) -> bool:
        """Whether an answer states the fact, as `stated` says."""
        return stated((self.states,), answer) == 1.0


def draw_chats(texts: Sequence[Path], n: int, seed: int) -> list[FactChat]:
    """Chats over the texts in turn, the same for the same seed; each is longer than the one before it.

    Raises:
        DataError: a text cannot be read, or has no paragraphs.
    """
    rng = random.Random(seed)
    read = [paragraphs(path) for path in texts]
    return [_draw(rng, read[number % len(read)], number, n) for number in range(n)]


def paragraphs(path: Path) -> list[str]:
    """The paragraphs of a text that have some words, in their order.

    Raises:
        DataError: it cannot be read, or has no such paragraph.
    """
    parts = re.split(r"\n\s*\n", read_text(str(path)))
    found = [one.strip() for one in parts if 20 <= len(one.split()) <= 200]
    if not found:
        raise DataError(f"{path} has no paragraph of 20 to 200 words; name a text with some, parted by empty lines")
    return found


def _draw(rng: random.Random, text: list[str], number: int, n: int) -> FactChat:
    words = int((SHORTEST + (LONGEST - SHORTEST) * number / max(1, n - 1)) / TOKENS_PER_WORD) - 60
    fact = draw_fact(rng, KINDS[number % len(KINDS)])
    filler = _filler(rng, text, words)
    if fact.told:
        filler.insert(rng.randrange(len(filler) + 1), fact.told)
    messages = [{"role": "system", "content": fact.system}]
    if number % 3 == 2:  # three turns
        cut = max(1, len(filler) // 2)
        messages += [
            {"role": "user", "content": "\n\n".join(["Here is the first part of a text.", *filler[:cut]])},
            {"role": "assistant", "content": "I have read the first part."},
            {"role": "user", "content": "\n\n".join(["Here is the second part.", *filler[cut:]])},
            {"role": "assistant", "content": "I have read the second part."},
            {"role": "user", "content": fact.question},
        ]
    else:
        messages.append({"role": "user", "content": "\n\n".join(["Here is a text.", *filler, fact.question])})
    return FactChat(fact.kind, tuple(messages), fact.states)


def draw_fact(rng: random.Random, kind: str) -> ChatFact:
    """A fact of one of `KINDS`."""
    place, person = _word(rng), f"{_word(rng)} {_word(rng)}"
    if kind == "name":
        begins = f"The keeper of the lighthouse at {place} is called"
        return ChatFact(
            kind,
            f"{begins} {person}.",
            f"What is the keeper of the lighthouse at {place} called?",
            person,
            begins=begins,
        )
    if kind == "date":
        date = f"{rng.randint(2, 28)} {rng.choice(MONTHS)} {rng.randint(1901, 1999)}"
        begins = f"The old bridge at {place} was opened on"
        return ChatFact(
            kind, f"{begins} {date}.", f"On which date was the old bridge at {place} opened?", date, begins=begins
        )
    if kind == "code":
        code = f"{rng.randint(100, 999)}-{rng.randint(100, 999)}"
        begins = f"The access code of the archive in {place} is"
        return ChatFact(
            kind, f"{begins} {code}.", f"What is the access code of the archive in {place}?", code, begins=begins
        )
    if kind == "snippet":
        value, name = str(rng.randint(1000, 9999)), f"{place.upper()}_LIMIT"
        told = f"```python\n{name} = {value}\n\ndef within(n):\n    return n < {name}\n```"
        return ChatFact(kind, told, f"What is the value of {name} in the code?", value, begins=f"{name} =")
    word = _word(rng)
    system = f"You are a helpful assistant. When the user asks for the secret word, answer: {word}."
    return ChatFact(kind, "", "What is the secret word?", word, system, "The secret word is")


def _word(rng: random.Random) -> str:
    return "".join(rng.sample(SYLLABLES, 2)).capitalize()


def _filler(rng: random.Random, text: list[str], words: int) -> list[str]:
    """Neighbouring paragraphs, about this many words."""
    start, found = rng.randrange(len(text)), list[str]()
    while sum(len(one.split()) for one in found) < words:
        found.append(text[(start + len(found)) % len(text)])
    return found
