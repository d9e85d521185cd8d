"""English made here: words, names for things to remember, and prose that says nothing in particular.

Everything is drawn from a stream that the caller names. This module knows no tokenizer and no task.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from millpond.errors import OptionError


def _words(text: str) -> tuple[str, ...]:
    """Cut at white space."""
    return tuple(text.split())


def _phrases(text: str) -> tuple[str, ...]:
    """Cut at bars."""
    return tuple(" ".join(text.split()).split("|"))


_ADJECTIVES = _words(
    """
    amber ancient bitter brave bright broken calm careful clever cold crimson curious dusty eager early empty faint
    famous fierce foreign frozen gentle golden grand hidden hollow honest humble idle jolly keen lazy little lonely loud
    lucky mellow modest muddy narrow noble odd patient plain pale polite proud purple quiet rapid rare restless rough
    rusty scarlet secret sharp shy silent silver simple sleepy slender slow smooth solemn stormy strange stubborn sturdy
    sudden sunny sweet tall tender tidy tiny weary wild wise wooden young
    """
)
_NOUNS = _words(
    """
    apron arch bakery barn basin bell bench blanket boat bottle bridge broom bucket cabin candle canyon carpet cart
    castle chapel chimney clock coat compass cottage cradle curtain desert door drawer drum engine farm feather fence
    ferry fiddle forest fountain garden gate glove hammer harbor harvest hill island jacket kettle kitchen ladder lamp
    lantern ledger library lighthouse market meadow mill mirror mountain museum needle nest oven paddle palace pantry
    parcel path pencil piano pillow pocket pond prairie quarry quilt raft river saddle school shelter shovel stable
    stair station stove table tavern temple thimble tower train tunnel valley village violin wagon wall well wheel
    window workshop
    """
)
_PEOPLE = _words(
    """
    baker teacher sailor farmer doctor painter tailor miller soldier gardener merchant neighbour carpenter clerk singer
    shepherd traveller judge printer fisherman weaver potter student captain
    """
)
_VERBS = _words(
    """
    admired borrowed carried cleaned described discovered drew examined followed forgot guarded inspected left measured
    mended missed noticed painted praised remembered repaired sketched sold studied visited watched
    """
)
_WHEN = _phrases(
    """
    At dawn|By the end of the week|In the first days of spring|Long before the war|On market days|After the rain had
    stopped|Every other winter|Toward evening|Not long ago|In those years|Once a month|Between two storms
    """
)
_WHY = _phrases(
    """
    because nobody else would|although the reason was never clear|as people in that region often do|without saying a
    word about it|and thought no more of it|so that the others could rest|in the hope of better weather|which surprised
    the whole street|while the bells were ringing|for reasons of their own
    """
)
_FRAMES = (
    "{when} the {person} {verb} the {a} {n}.",
    "The {a} {n} stood beside the {n2}, and a {person} {verb} it {why}.",
    "It is said that the {person} {verb} a {n} {why}.",
    "{when} there was only one {n} in the {n2}.",
    "A {person} and a {person2} {verb} the {n} together.",
    "Nobody asked why the {n} near the {a} {n2} was so {a2}.",
    "The {person} {verb} the {n}, then the {n2}, {why}.",
    "{when} a {a} {person} came past the {n} and {verb} what was left of it.",
    "What makes a {n} {a} is a question that every {person} answers differently.",
    "There is more to a {a} {n} than the {person} would admit.",
    "The {n2} was {a}, the {n} was {a2}, and the {person} {verb} both.",
    "{when} one could see the {n} from the {n2}, {a} and {a2}.",
)
#: What repeats where a haystack shall hold nothing to read.
NOISE = ("Rain falls on the roof.", "The road goes on.", "A dog sleeps by the door.", "Clouds pass over the hill.")
_ENDS = _words("field ford wood stone brook gate house land mark side well bank moor cliff dale fall")
_LAST = _ENDS + _NOUNS
#: How many different words `words` can give.
ALL_WORDS = len(_NOUNS) * len(_LAST)


def prose(rng: random.Random) -> Iterator[str]:
    """Sentences without end: varied, grammatical, about nothing."""
    while True:
        n, n2 = rng.sample(_NOUNS, 2)
        a, a2 = rng.sample(_ADJECTIVES, 2)
        person, person2 = rng.sample(_PEOPLE, 2)
        words = {"n": n, "n2": n2, "a": a, "a2": a2, "person": person, "person2": person2}
        words |= {"verb": rng.choice(_VERBS), "when": rng.choice(_WHEN), "why": rng.choice(_WHY)}
        yield re.sub(r"\b([Aa]) (?=[aeio])", r"\1n ", rng.choice(_FRAMES).format_map(words))


def noise() -> Iterator[str]:
    """The same few sentences for ever."""
    while True:
        yield from NOISE


def keys(rng: random.Random, count: int) -> list[str]:
    """`count` different names for things to remember, such as "quiet-lantern"."""
    return [f"{_ADJECTIVES[a]}-{_NOUNS[n]}" for a, n in _pairs(rng, count, len(_ADJECTIVES), len(_NOUNS), "keys")]


def words(rng: random.Random, count: int) -> list[str]:
    """`count` different words, each one word of letters, such as "lanternford"."""
    return [_NOUNS[n] + _LAST[e] for n, e in _pairs(rng, count, len(_NOUNS), len(_LAST), "words")]


def _pairs(rng: random.Random, count: int, left: int, right: int, what: str) -> list[tuple[int, int]]:
    if count > left * right:
        raise OptionError(f"{count} different {what} were requested, and there are {left * right}; ask for fewer")
    return [divmod(index, right) for index in rng.sample(range(left * right), count)]
