"""The walk over every number that a request may hold: options of all methods, fields of bodies, numbers in texts."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from millpond.methods import METHODS
from millpond.registry import Option
from tests.helpers.server.live import Live

#: A prompt that takes a few passes, and most CPU seconds that an answer may take.
PROMPT, MOST_S = [5 + place % 200 for place in range(300)], 2.0
#: JSON of what every numeric option is given besides its range's ends.
VALUES = (
    "-1",
    "0",
    "1",
    "0.5",
    str(2**31),
    str(2**63),
    str(2**70),
    "NaN",
    "Infinity",
    "1e308",
    "1e-320",
    "true",
    '"5"',
    '"nan"',
    "[]",
    "null",
)
#: Numbers as they may stand inside a text.
WORDS = ("0", "1", "-1", "0.5", "1e5", "9" * 30, "9" * 400, "9" * 5000, str(2**31), str(2**63), "inf", "nan")
#: Texts with a number V in them: the method, its option, the text; for budgets and formats no option.
NESTED = (
    ("ada", "score", "h2o/recent=V"),
    ("ada", "score", "snapkv/kernel=V"),
    ("chunkkv", "score", "dms/threshold=V"),
    ("pyramidkv", "score", "ada/alpha=V/score=h2o/sinks=V"),
    ("merge_on_evict", "score", "ada/every=V/score=h2o"),
    ("layer_table", "table", "V;1"),
    ("fastgen", "special", "V;2"),
    ("fastgen", "punctuation", "V"),
    ("kvzip", "ask", "V;1"),
)
BUDGETS = ("V%", "V", "VMiB", "VGiB", "Vb", "20%, at least V")
FORMATS = ("bf16:V,int4", "bf16:V%,int4", "V=int4,*=bf16", "0-V=int4,*=bf16", "bf16:20%,int8:V,int4", "intV")
#: Numeric fields of a body, and those inside lists; W is the value.
FIELDS = (
    *(
        f'"{name}": W'
        for name in (
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "typical_p",
            "min_tokens",
            "seed",
            "max_tokens",
            "n",
            "best_of",
            "logprobs",
        )
    ),
    '"logit_bias": {"5": W}',
    '"stop_token_ids": [W]',
    '"allowed_token_ids": [W]',
    '"prompt": [5, W]',
    *(
        f'"millpond": {{"method": "h2o", "budget": "50%", {text}}}'
        for text in (
            '"priority": W',
            '"deadline_s": W',
            '"max_kl": W',
            '"recompute": W',
            '"budget": W',
            '"keep": [[0, W]]',
            '"keep": [[W, 5]]',
            '"fair_shares": [[0, 5, W]]',
            '"fair_shares": [[0, W, 0.1]]',
            '"fair_shares": W',
            '"chunks": [[0, W]]',
            '"breakpoints": [W]',
        )
    ),
)


@dataclass(frozen=True, slots=True)
class Probe:
    """A body as JSON text.

    Attributes:
        name: of what it tries. body: the text. refusal: what a refusal must say, all of it.
    """

    name: str
    body: str
    refusal: tuple[str, ...] = ()


@dataclass(slots=True)
class Walked:
    """What a walk has found.

    Attributes:
        statuses: how many answers had each. wrong: what must not be. slowest: CPU seconds and names.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest: list[tuple[float, str]] = field(default_factory=list)


def ends(option: Option) -> Iterator[tuple[str, bool]]:
    """JSON of the ends of an option's ranges, and of the next numbers outside; whether each is inside of one."""
    for kind, allowed in option.numbers.items():
        for end, beyond in ((allowed.low, -1), (allowed.high, 1)):
            if math.isfinite(end):
                yield json.dumps(kind(end)), kind(end) == end and allowed.holds(end)
                yield json.dumps(kind(end + beyond)), False


def methods_options() -> Iterator[tuple[str, Option]]:
    """Every numeric option of every method."""
    for method in METHODS.names():
        for option in METHODS.get(method).options.values():
            if option.numbers:
                yield method, option


def by_value() -> Iterator[Probe]:
    """Every numeric option with every value, all other options as they are."""
    for method, option in methods_options():
        outside = {text for text, inside in ends(option) if not inside and not _fits(option, json.loads(text))}
        outside |= {text for text in (str(2**63), str(2**70)) if not _fits(option, json.loads(text))}
        for text in dict.fromkeys([*VALUES, *(text for text, _ in ends(option))]):
            refusal = (f"{option.name}={json.loads(text)}", option.range_text) if text in outside else ()
            yield Probe(f"{method} {option.name}={text}", _of(method, {option.name: "@"}).replace('"@"', text), refusal)


def by_choice() -> Iterator[Probe]:
    """Every numeric option at its range's ends, with each other choice of the method's other options."""
    for method, option in methods_options():
        for other in METHODS.get(method).options.values():
            values = [other.default is False] if other.annotation is bool else other.choices
            for value in values if other.name != option.name else ():
                for text in (text for text, inside in ends(option) if inside and value != other.default):
                    body = _of(method, {option.name: "@", other.name: value}).replace('"@"', text)
                    yield Probe(f"{method} {option.name}={text} {other.name}={value}", body)


def by_text() -> Iterator[Probe]:
    """Numbers inside of texts: nested methods, budgets, formats; and texts that are too long."""
    for word in WORDS:
        for method, option, text in NESTED:
            yield Probe(f"{method} {option}={text} {word[:20]}", _of(method, {option: text.replace("V", word)}))
        for text in BUDGETS:
            yield Probe(f"budget {text} {word[:20]}", _of("h2o", {}, budget=text.replace("V", word)))
        for text in FORMATS:
            yield Probe(f"codec {text} {word[:20]}", _of("h2o", {}, codec=text.replace("V", word)))
    for depth in (1, 5, 50, 2000):
        yield Probe(f"nested {depth} times", _of("ada", {"score": "pyramidkv/score=" * depth + "h2o"}))
    long = "x" * 1_000_000
    for name, millpond in (
        ("method", {"method": long}),
        ("option", {"method": "h2o", "options": {long: 1}}),
        ("budget", {"budget": long}),
        ("codec", {"codec": "int4," * 100_000}),
        ("preset", {"preset": long}),
        ("table", {"method": "layer_table", "options": {"table": "1;" * 1000 + "1"}}),
        ("options", {"options": {f"x{place}": 1 for place in range(10_000)}}),
    ):
        yield Probe(f"a long {name}", json.dumps(_common() | {"millpond": millpond}))


def by_field() -> Iterator[Probe]:
    """Every numeric field of a body with every value."""
    more = ("2", "128", "129", str(2**31 - 1), str(2**53), "9" * 400, "1e999", "-1e308", "{}")
    for text in FIELDS:
        name = text.split('"')[1]
        common = {key: value for key, value in _common().items() if key != name}
        for value in (*VALUES, *more):
            body = f"{json.dumps(common)[:-1]}, {text.replace('W', value)}}}"
            yield Probe(f"{text[-40:]} {value[:20]}", body)


def walk(server: Live, probes: list[Probe]) -> Walked:
    """Send each probe with one key, and beside it a request with another whose answer must stay what it is."""
    found = Walked()
    with server.client() as mine, server.client() as theirs:
        expected = _neighbour(theirs)
        for probe in probes:
            beside: list[Any] = []
            thread = threading.Thread(target=lambda beside=beside: beside.append(_neighbour(theirs)))
            began = time.process_time()
            thread.start()
            answer = mine.post("/v1/completions", content=probe.body, headers=_headers("mine"))
            seconds = time.process_time() - began
            thread.join()
            found.statuses[answer.status_code] += 1
            found.slowest = sorted([*found.slowest, (seconds, probe.name)], reverse=True)[:5]
            for wrong in _wrong(answer, probe, seconds, beside == [expected]):
                found.wrong.append(f"{probe.name}: {wrong}")
    return found


def _wrong(answer: Any, probe: Probe, seconds: float, same: bool) -> Iterator[str]:
    """What must not be of an answer."""
    if answer.status_code not in (200, 400, 403, 408):  # 403: a priority of others; 408: a deadline that is over
        allowed = answer.status_code == 422 and answer.json()["error"]["code"] in ("budget_impossible", "would_forget")
        allowed |= answer.status_code == 413 and "a long" in probe.name
        if not allowed:
            yield f"{answer.status_code} {answer.text[:200]}"
    if seconds > MOST_S:
        yield f"{seconds:.1f} CPU seconds"
    if not same:
        yield "the request beside it has another answer"
    if probe.refusal and not (answer.status_code == 400 and all(part in answer.text for part in probe.refusal)):
        yield f"{probe.refusal} is not in {answer.status_code} {answer.text[:200]}"


def _fits(option: Option, value: float) -> bool:
    """Whether an option takes this number."""
    return any(
        allowed.holds(value) for kind, allowed in option.numbers.items() if kind is float or isinstance(value, int)
    )


def _of(method: str, options: dict[str, Any], **settings: Any) -> str:
    """The body of a request whose cache is kept so, with a budget where the method takes one."""
    if method not in ("full", "minference"):
        settings = {"budget": "50%"} | settings
    return json.dumps(_common() | {"millpond": {"method": method, "options": options} | settings})


def _common() -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}


def _headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}


def _neighbour(client: Any) -> Any:
    """The tokens of a request of another key, and their log probabilities, to the last bit."""
    body = {"prompt": [9] * 40, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    answer = client.post("/v1/completions", json=body, headers=_headers("theirs"))
    return answer.json()["choices"][0]["logprobs"] if answer.status_code == 200 else answer.text
