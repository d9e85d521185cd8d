"""Hostile requests of every kind while a well-behaved client streams: nothing of it is lost, and it is not held up."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.server.attacker import ADDRESSES
from tests.helpers.server.attacks import ATTACKS, FINE, LONG
from tests.helpers.server.hostile import TEXT
from tests.helpers.server.load import Answer, GoodClient, Pace
from tests.helpers.server.serving import Serving, serving

OPTIONS = ("--model", "pond-text-long", "--dtype", "f32", "--kv-memory", "64MiB", "--budget", "64")
WARM = {
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 4,
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}},
}
#: Kept prompts fill what OPTIONS gives to caches: 64 MiB are 10,900 tokens of this model.
PROMPTS_THAT_FILL, FILLING_TOKENS = 4, 4_000
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True, scope="module")
def other_addresses() -> None:
    try:
        with socket.socket() as made:
            made.bind((ADDRESSES[0], 0))
    except OSError:
        pytest.skip(f"this system has no loopback address {ADDRESSES[0]}: ifconfig lo0 alias {ADDRESSES[0]}")


@dataclass
class Course:
    """What was seen: answers before, during and after, what the attackers were told, and bytes of memory."""

    before: list[Answer] = field(default_factory=list)
    during: list[Answer] = field(default_factory=list)
    after: list[Answer] = field(default_factory=list)
    ends: dict[str, dict[str, int]] = field(default_factory=dict)
    rss: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        paces = "\n".join(f"{name:7} {Pace.of(getattr(self, name))}" for name in ("before", "during", "after"))
        return f"{paces}\nRSS {self.rss[0] / 2**20:.0f} MB, then {self.rss[1] / 2**20:.0f}"


@contextmanager
def attackers(server: Serving, number: int, *more: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.helpers.server.attacker", server.url, str(number), "0", *more]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def run(number: int, quiet: int, rest_s: float, *more: str) -> Course:
    """So many hostile requests between so many answers in quiet, and what is held after some seconds of rest."""
    course = Course()
    with serving(*OPTIONS) as server, attackers(server, number, *more) as others, GoodClient(server.url) as client:
        assert others.stdin is not None
        assert others.stdout is not None
        assert others.stdout.readline() == "ready\n"
        if find_spec("xgrammar") is not None:
            assert client.post("/v1/chat/completions", WARM).status_code == 200  # which starts what compiles grammars
        for first in range(3, 3 + PROMPTS_THAT_FILL):  # the memory for caches is in use, as with clients of any kind
            assert client.post(TEXT, {"prompt": [first] * FILLING_TOKENS, "max_tokens": 1}).status_code == 200
        course.before = client.wait_for(quiet)
        held = server.resident_bytes()
        begin = len(client.answers)
        others.stdin.write("\n")
        others.stdin.flush()
        course.ends = json.loads(others.stdout.readline())
        course.during = client.answers[begin:]
        client.wait_for(2)
        course.after = client.wait_for(quiet)
        time.sleep(rest_s)
        course.rss = held, server.resident_bytes()
        assert server.alive
        waiting = [client.metrics()["millpond_requests_waiting"] for _ in range(20)]  # the client's own may, too
        assert client.get("/health").status_code == 200
    assert min(map(float, waiting)) == 0
    assert not any("Traceback" in line for line in server.log), "".join(server.log)
    return course


def check_nothing_is_lost(course: Course) -> None:
    answers = [*course.before, *course.during, *course.after]
    assert [one.error for one in answers if one.error] == []
    for prompt in {one.prompt for one in course.before}:
        assert len({one.text for one in answers if one.prompt == prompt}) == 1


#: A connection that the server closed; and an attacker that did not wait longer for its turn behind other attackers.
CLOSED, IMPATIENT = {"0", "ConnectionResetError", "BrokenPipeError", "RemoteDisconnected"}, {"TimeoutError"}


def check_answers(course: Course) -> None:
    """Every hostile request was answered with a status that says why, or its connection was closed."""
    fine = {*map(str, FINE), *CLOSED, *IMPATIENT}
    assert {name: ends for name, ends in course.ends.items() if not fine.issuperset(ends)} == {}


@pytest.mark.slow
def test_one_hostile_request_of_each_short_kind() -> None:
    """One of each kind that is short, eight at a time. Other tests run on the same cores, so no factor can be measured
    here: the long test, which runs alone, holds it. What this one holds is that nothing stands still, as it did for 9
    to 34 seconds while bodies and schemas were read on the event loop or in the engine's thread.
    """
    course = run(len(set(ATTACKS) - LONG), 6, 1, "quick")
    print(course)
    check_nothing_is_lost(course)
    check_answers(course)
    assert Pace.of(course.during).longest < 5


@pytest.mark.slow
@pytest.mark.xfail(reason="3 to 10 times were seen on 2 cores, over one or two answers", strict=False)
def test_one_of_each_short_kind_slows_a_token_down_less_than_eight_times() -> None:
    """The factor of the test above, where no other test takes the cores."""
    course = run(len(set(ATTACKS) - LONG), 6, 1, "quick")
    print(course)
    assert Pace.of(course.during).median < 8 * Pace.of(course.before).median


@pytest.fixture(scope="module")
def long_course() -> Course:
    """2,000 requests: one of each kind, however long it takes, and the others of the short kinds in turn."""
    found = run(2_000, 60, 20)
    print(found)
    return found


@pytest.mark.slow
def test_two_thousand_hostile_requests_lose_nothing(long_course: Course) -> None:
    check_nothing_is_lost(long_course)
    check_answers(long_course)


@pytest.mark.slow
def test_two_thousand_hostile_requests_at_most_double_the_time_of_a_token(long_course: Course) -> None:
    """The median over its answers of the time per token behind the first, and the mean with the first."""
    before, during = Pace.of([*long_course.before, *long_course.after]), Pace.of(long_course.during)
    assert during.median <= 2 * before.median
    assert during.whole <= 2 * before.whole


@pytest.mark.slow
@pytest.mark.xfail(reason="104 MB were seen with the memory for caches full before", strict=False)
def test_two_thousand_hostile_requests_leave_at_most_64_mb(long_course: Course) -> None:
    assert long_course.rss[1] - long_course.rss[0] <= 64 * 2**20
