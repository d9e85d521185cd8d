"""Plans of batches: what is read once, in which order, and what BatchLLM's rule for one level makes of it."""

from __future__ import annotations

import numpy as np
import pytest

from millpond.engine.batch_plan import BatchPlan, plan_batch
from millpond.errors import OptionError


def checked(prompts: list[list[int]], plan: BatchPlan, shortest: int) -> None:
    """Assert that every prompt comes once, behind a prefix that it begins with, and that the sums are right."""
    assert sorted(plan.order) == list(range(len(prompts)))
    read, seen = 0, set()
    for prefix, prompt in plan.readings:
        if prompt is None:
            of = plan.prefixes[prefix]
            begin = 0 if of.parent < 0 else plan.prefixes[of.parent].length
            assert of.length - begin >= shortest
            assert of.parent < 0 or of.parent in seen
            text = prompts[of.prompt][: of.length]
            assert of.parent < 0 or prompts[plan.prefixes[of.parent].prompt][:begin] == text[:begin]
            seen.add(prefix)
            read += of.length - begin
        else:
            begin = 0
            if prefix >= 0:
                assert prefix in seen
                of = plan.prefixes[prefix]
                begin = of.length
                assert prompts[of.prompt][:begin] == prompts[prompt][:begin]
                assert begin < len(prompts[prompt])
            read += len(prompts[prompt]) - begin
    assert len(seen) == len(plan.prefixes)
    assert plan.to_read == read
    assert plan.tokens == sum(map(len, prompts))
    assert plan.least <= plan.to_read <= plan.tokens


def levels_of_prompts(seed: int) -> list[list[int]]:
    """Prompts on three levels, in random order, as in section 2 of the design: 3 instructions, documents, questions."""
    rng = np.random.default_rng(seed)

    def part(low: int, high: int) -> list[int]:
        return rng.integers(1, 30_000, rng.integers(low, high)).tolist()

    prompts = []
    for _ in range(3):
        first = part(20, 60)
        for _ in range(rng.integers(4, 9)):
            second = part(60, 240)
            prompts += [first + second + part(5, 30) for _ in range(rng.integers(2, 12))]
    return [prompts[n] for n in rng.permutation(len(prompts))]


@pytest.mark.parametrize("levels", [None, 1])
@pytest.mark.parametrize("seed", range(12))
def test_random_batches(seed: int, levels: int | None) -> None:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 2, rng.integers(0, 14)).tolist() for _ in range(30)]
    for shortest in (1, 3):
        checked(prompts, plan_batch(prompts, levels=levels, shortest=shortest), shortest)


@pytest.mark.parametrize("seed", range(4))
def test_each_token_that_differs_is_read_once(seed: int) -> None:
    prompts = levels_of_prompts(seed)
    plan, one = plan_batch(prompts), plan_batch(prompts, levels=1)
    checked(prompts, plan, 16)
    checked(prompts, one, 16)
    assert plan.to_read <= 1.01 * plan.least
    assert plan.to_read < one.to_read < 1.25 * plan.least
    assert all(prefix.parent == -1 for prefix in one.prefixes)
    assert any(prefix.parent >= 0 for prefix in plan.prefixes)
    assert plan_batch(prompts, levels=0).to_read == plan.tokens


def test_one_level_forks_where_it_spares() -> None:
    """Behind 30 common tokens four prompts with 40 more pay for reading the 30 again, two with 20 do not."""
    head, long, short = list(range(30)), list(range(100, 140)), list(range(200, 220))
    many = [head + long + [300 + n, 1] for n in range(4)]
    few = [head + short + [400 + n, 1] for n in range(2)]
    other = [[*head, 500, 1]]
    plan = plan_batch(many + few + other, levels=1)
    assert sorted(prefix.length for prefix in plan.prefixes) == [30, 70]
    assert plan.to_read == 70 + 4 * 2 + 30 + 2 * 22 + 2
    assert plan_batch(many + few + other).to_read == 30 + 40 + 4 * 2 + 20 + 2 * 2 + 2
    assert sorted(prefix.length for prefix in plan_batch(many + few, levels=1).prefixes) == [
        50,
        70,
    ]  # one child is left


def test_most_of_a_path_is_held_at_a_time() -> None:
    head = list(range(50))
    prompts = [head + [60 + n] * 40 + [m, m] for n in range(5) for m in range(3)]
    assert plan_batch(prompts).most_pinned == 50 + 40


def test_siblings_with_long_answers_to_few_tokens_come_first() -> None:
    texts = [[n] * 20 + [m, m] for n in (1, 2, 3) for m in (7, 8)]
    answers = [1, 1, 100, 100, 10, 10]
    assert plan_batch(texts, answers).order[:4] == [2, 3, 4, 5]


def test_prompts_that_are_equal_or_prefixes_of_each_other_read_their_last_token() -> None:
    text = list(range(64))
    plan = plan_batch([text, text, text[:40], text[:40], [], [5]])
    checked([text, text, text[:40], text[:40], [], [5]], plan, 16)
    assert sorted(prefix.length for prefix in plan.prefixes) == [39, 63]
    assert plan.to_read == 63 + 4 + 1


def test_a_chain_of_prompts_shares_in_steps_of_the_shortest_trunk() -> None:
    base = list(range(400))
    prompts = [base[:n] for n in range(400)]
    plan = plan_batch(prompts, shortest=16)
    checked(prompts, plan, 16)
    assert plan.to_read < 400 * 17 + 400


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levels": 2}, "levels=2 must be 0, 1, or None"),
        ({"shortest": 0}, "shortest=0 must be at least 1"),
        ({"answers": [1.0]}, "1 answers for 2 prompts"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        plan_batch([[1], [2]], **options)  # type: ignore[arg-type]


def block(first: int, prefix: int, *ends: int) -> list[list[int]]:
    """Two prompts that begin with `prefix` tokens of their own, and end with so many others."""
    return [[first] * prefix + [1_000 + first + n] * end for n, end in enumerate(ends)]


def test_the_tokens_of_a_prefix_count_among_those_that_its_prompts_read() -> None:
    """20 tokens of answers to 204 read come behind 18 to 24, though to 4 they would come first."""
    prompts = block(1, 200, 2, 2) + block(50, 20, 2, 2)
    assert plan_batch(prompts, [10, 10, 9, 9]).order == [2, 3, 0, 1]
    assert plan_batch(prompts, [10, 10, 0.5, 0.5]).order == [0, 1, 2, 3]


def test_what_follows_a_prefix_on_all_levels_counts_for_it() -> None:
    """Behind 20 tokens one more prefix of 300: with its tokens the first is behind the other, without before it."""
    head, other = [1] * 20, [9] * 20
    deep = [head + [2] * 300 + [n, n] for n in (3, 4)] + [[*head, 5, 5]]
    near = [[*other, n, n] for n in (6, 7)]
    answers = [8, 8, 8, 8, 8]
    assert plan_batch(deep + near, answers).order[:2] == [3, 4]
    assert plan_batch(deep + near, [200, 200, 8, 8, 8]).order[-2:] == [3, 4], "and so do the answers"


def test_prompts_with_longer_answers_to_what_is_left_come_first_behind_their_trunk() -> None:
    prompts = [[1] * 30 + [7] * 10, [1] * 30 + [8] * 2, [1] * 30 + [9] * 5]
    assert plan_batch(prompts).order == [1, 2, 0]
    assert plan_batch(prompts, [100, 1, 1]).order == [0, 1, 2]
