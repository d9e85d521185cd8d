"""Common options of methods over other methods: the name of the one that they build on."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from millpond.errors import OptionError
from millpond.methods import METHODS
from millpond.option_files import named_in
from millpond.option_ranges import brief
from millpond.policy.head_allocation import Ada
from millpond.policy.layer_allocation import AcrossLayers
from millpond.policy.policy import Policy

#: A slash begins an option only before `name=`, so that a value may hold one (a path).
_OPTION = re.compile(r"/(?=[A-Za-z_]\w*=)")

#: Characters of a method with its options in one text, and methods one inside another.
MAX_TEXT, MAX_NESTED = 4_000, 8


def based_on(owner: str, text: str) -> Policy:
    """Return the policy that `text` names: "h2o", or with options "snapkv/window=8/kernel=5".

    Raises:
        OptionError: no such method or option, the method has no score, or the text is too long.
    """
    if len(text) > MAX_TEXT or text.count("/score=") >= MAX_NESTED:
        raise OptionError(
            f"{owner}: score={brief(text)} must have at most {MAX_TEXT:,} characters and {MAX_NESTED} methods one "
            "inside another"
        )
    name, options = base_spec(owner, text)
    with named_in(text):
        base = METHODS.get(name)(**options)
    if base.keeps_all:
        raise OptionError(f"{owner}: score={text!r} keeps everything and has no score to share a budget by")
    return base


def base_spec(owner: str, text: str) -> tuple[str, dict[str, Any]]:
    """Return the method that `text` names, and its options as text.

    What follows `score=` names the next method down: "pyramidkv/beta=10/score=snapkv/window=8".

    Raises:
        OptionError: something that is no option, or an option given twice.
    """
    head, nested, score = text.partition("/score=")
    name, *parts = _OPTION.split(head)
    if "/" in name or "=" in name:
        raise OptionError(f"{owner}: score={text!r} must read name or name/option=value, for example h2o/sinks=0")
    options: dict[str, Any] = {"score": score} if nested else {}
    for part in parts:
        option, _, value = part.partition("=")
        if option in options:
            raise OptionError(f"{owner}: score={text!r} gives {option!r} twice")
        options[option] = value
    return name, options


def merge_steps(owner: str, every: int, merges: bool) -> int:
    """Return `every`, the entries that gather between two merges while decoding.

    Raises:
        OptionError: more than 1 for a method that does not merge while decoding.
    """
    if every > 1 and not merges:
        raise OptionError(f"{owner}: every={every}, but nothing is merged while decoding; leave it out")
    return every


def across_layers(owner: str, policy: Policy, across: bool) -> Policy:
    """Return the policy, with one budget for the heads of all layers if `across`.

    Raises:
        OptionError: it evicts at each step or in chunks, before all layers have read what follows.
    """
    if not across:
        return policy
    if policy.every_step or policy.prefill != "once":
        raise OptionError(
            f"{owner}: across=true shares one budget over all layers once they have all read the prompt, and entries "
            "that leave at each step or chunk leave before; give across=false, or prefill='once' and decode='grow'"
        )
    return replace(policy, heads=Ada(alpha=0.0), layers=AcrossLayers(policy.protect, policy.score))
