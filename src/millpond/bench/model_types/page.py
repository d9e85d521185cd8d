"""The page of model types, from what the survey found."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from millpond.bench.common.report import markdown_table
from millpond.bench.model_types.finding import BROKEN, EQUAL, NOT_TRIED, REFUSED, WRONG, Finding, Outcome
from millpond.bench.model_types.greedy import LENGTHS, NEW, WITHIN
from millpond.bench.model_types.probe import AMPLE, SETTINGS, SMALL

_ORDER = (EQUAL, REFUSED, NOT_TRIED, WRONG, BROKEN)
_INTRO = """# Model types

Every type of language model in transformers {transformers}, made in tiny form with random weights and tried out (torch
{torch}, float32, `{command}`): {counts}.

**equal**: greedy generation of {new} tokens after a padded batch of {prompts} tokens gives the tokens of
transformers' own `generate`, and logits within {within:g} of the largest one (or of 1), with a budget of {ample}
entries that holds everything. With {small} entries, no KV head holds more (methods that grow do by what is decoded), a
second run gives the same numbers, and, where a method only hides entries, logits are those of transformers' own full
cache under a mask that hides at each step what left. `streaming` turns the positions of what stays, so that a mask
cannot follow it; `streaming, absolute` (`positions="absolute"`) does not, and runs where positions cannot be turned.

**refused**: `compress`, or the first pass, raises the error whose sentence stands beside it. **not tried**: the type
could not be made, or writes no text of its own; why stands beside it. *Native layers* decode in native calls
(`native_layers`) on the CPU of this run; of others the large linear ones do. A checkpoint may turn on what the defaults
of its type leave off: an indexer, shared caches and their like are refused wherever they come.
"""


def render(data: dict[str, Any]) -> str:
    """The page of what `benchmarks/model_types.py` wrote."""
    alone, beside = ([Finding.of(row) for row in data[part]] for part in ("text", "composite"))
    text = _INTRO.format(
        transformers=data["transformers"], torch=data["torch"], command=data["command"], counts=_counts(alone + beside),
        new=NEW, prompts=" and ".join(map(str, LENGTHS)), within=WITHIN, ample=AMPLE, small=SMALL,
    )  # fmt: skip
    return (
        f"{text}\n## Text\n\n{_table(alone)}\n## Pictures or sound beside text\n\n"
        "Tried with text alone, but for those that write about a picture only, and for "
        "[three](../../tests/hf/test_vision.py) whose tests have pictures. Types that let a picture or a "
        f"prefix see ahead are refused where they do.\n\n{_table(beside)}"
    )


def _counts(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.status for finding in findings)
    return ", ".join(f"{counts[status]} {status}" for status in _ORDER if counts[status])


def _table(findings: Sequence[Finding]) -> str:
    rows = [
        (
            f"`{finding.model_type}`",
            *(finding.outcomes.get(name, Outcome(finding.status)).status for name in SETTINGS),
            "{} of {}".format(*finding.native_layers) if finding.native_layers[1] else "",
            _reason(finding),
        )
        for finding in findings
    ]
    head = ("type", *(f"`{name}`" for name in SETTINGS), "native layers", "why")
    return markdown_table(head, rows).replace("---:", "---")


def _reason(finding: Finding) -> str:
    """Why something is not equal: all, or some of the settings."""
    reasons: dict[str, list[str]] = {}
    for name, outcome in finding.outcomes.items():
        if outcome.reason:
            reasons.setdefault(_short(outcome.reason), []).append(name)
    if finding.reason:
        return _short(finding.reason)
    return "; ".join(f"{', '.join(f'`{name}`' for name in names)}: {reason}" for reason, names in reasons.items())


def _short(reason: str) -> str:
    """Without the name of the class, which the type tells, and on one line of a table."""
    return re.sub(r"^\w*[A-Z]\w* (\(model type '[^']*'\) )?(?=[a-z])", "", reason).replace("|", "\\|")
