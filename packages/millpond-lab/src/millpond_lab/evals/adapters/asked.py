"""lm-eval's generation arguments as a question; only greedy decoding is known here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millpond.errors import OptionError
from millpond_lab.evals.sample import Question

#: lm-eval's names for the most tokens of an answer, the first one given counts; and what holds where none is given.
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
DEFAULT_LENGTH = 256
#: Arguments of sampling, and the values that change nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "temperature": (0, None),
    "top_p": (1, None),
    "top_k": (0, 1, -1, None),
    "min_p": (0, None),
    "typical_p": (1, None),
    "repetition_penalty": (1, None),
    "num_beams": (1, None),
    "seed": (None,),
}
#: Arguments that only sampling uses; explicit greedy decoding ignores them.
ONLY_SAMPLING = {"temperature", "top_p", "top_k", "min_p", "typical_p", "seed"}


def greedy_question(arguments: Mapping[str, Any]) -> Question:
    """The question that decodes as `arguments` say.

    Raises:
        OptionError: sampling is requested, or an argument is not known.

    Example:
        >>> greedy_question({"until": ["."], "max_gen_toks": 8, "do_sample": False}).stop
        ('.',)
    """
    left = dict(arguments)
    until = left.pop("until", None) or ()
    lengths = [value for value in (left.pop(name, None) for name in LENGTHS) if value is not None]
    length = int(lengths[0]) if lengths else DEFAULT_LENGTH
    if length < 1:
        raise OptionError(f"max_gen_toks={length} must be at least 1")
    greedy = left.pop("do_sample", None)
    if greedy not in (None, False):
        raise OptionError(f"do_sample={greedy!r}: answers are decoded greedily here; leave it out or set it to false")
    for name, value in left.items():
        if name not in NEUTRAL:
            raise OptionError(
                f"generation argument {name!r} is not known here; known are until, {', '.join(LENGTHS)} and "
                "do_sample=false"
            )
        if value not in NEUTRAL[name] and not (greedy is False and name in ONLY_SAMPLING):
            raise OptionError(f"{name}={value!r}: answers are decoded greedily here; leave it out")
    stops = (until,) if isinstance(until, str) else tuple(until)
    return Question("", max_new_tokens=length, stop=tuple(stop for stop in stops if stop))
