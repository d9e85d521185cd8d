"""The sampler as the engine uses it: batches of completions that come, go and differ in everything."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from millpond.engine.sampling.params import SamplingParams
from millpond.engine.sampling.sampler import BadLogitsError, Sampled, Sampler
from millpond.engine.sampling.token_scores import score_tokens
from millpond.errors import OptionError
from tests.helpers.examples import examples

SIZE = 30
ANY = [
    SamplingParams(temperature=0),
    SamplingParams(seed=1),
    SamplingParams(seed=1, temperature=0.4, top_p=0.8, logprobs=3),
    SamplingParams(seed=2, top_k=4, repetition_penalty=1.4),
    SamplingParams(temperature=0, frequency_penalty=2.0),
    SamplingParams(seed=-5, min_p=0.2, logit_bias={3: 4.0}),
    SamplingParams(seed=2**80, presence_penalty=1.0),
    SamplingParams(temperature=0, logprobs=0, logit_bias={0: 100}),
    SamplingParams(seed=3, typical_p=0.4),
    SamplingParams(seed=4, min_tokens=3, stop_token_ids=(2, 5), allowed_token_ids=(2, 5, 7, 8)),
]


def logits_at(key: int, step: int) -> Tensor:
    """What a model would say: of the completion and its step alone."""
    return 2 * torch.randn(SIZE, generator=torch.Generator().manual_seed(1000 * key + step))


def begin(sampler: Sampler, key: int) -> None:
    sampler.start(key, ANY[key], [1, 2, 3], bans=sampler.bans_of(ANY[key]))


def alone(key: int, steps: int) -> list[Sampled]:
    sampler = Sampler()
    begin(sampler, key)
    return [sampler([key], logits_at(key, step)[None])[0] for step in range(steps)]


@settings(max_examples=examples(30))
@given(st.data())
def test_the_batch_changes_nothing(data: st.DataObject) -> None:
    """Any of ten completions, each step a part of them in any order: each gets what it gets alone."""
    sampler, steps = Sampler(), dict.fromkeys(range(len(ANY)), 0)
    found: dict[int, list[Sampled]] = {key: [] for key in steps}
    for key in steps:
        begin(sampler, key)
    for _ in range(6):
        keys = data.draw(st.lists(st.sampled_from([*steps]), unique=True, min_size=1))
        for key, sampled in zip(keys, sampler(keys, torch.stack([logits_at(k, steps[k]) for k in keys])), strict=True):
            found[key].append(sampled)
            steps[key] += 1
    for key, n in steps.items():
        assert found[key] == alone(key, n)


def test_a_step_ahead_of_the_host_draws_the_same() -> None:
    """Each step is launched before the one before is read; the completions without bans, some of which leave."""
    keys = [key for key, params in enumerate(ANY) if not params.forbids]
    sampler, found = Sampler(), {key: list[Sampled]() for key in keys}
    for key in keys:
        begin(sampler, key)
    before, newest = None, None
    for step in range(8):
        stay = [key for key in keys if step < 5 or key % 2]
        if before is not None and len(stay) < len(before.keys):
            newest = before.tokens[[i for i, key in enumerate(before.keys) if key in stay]]
        now = sampler.launch(stay, torch.stack([logits_at(key, step) for key in stay]), newest)
        for key, sampled in zip(before.keys, sampler.finish(before), strict=True) if before is not None else ():
            found[key].append(sampled)
        before, newest = now, now.tokens
    for key in keys:
        assert found[key] == alone(key, 7)[: len(found[key])]
        assert len(found[key]) == (7 if key % 2 else 5)


def test_a_choice_that_is_not_finished_leaves_no_trace() -> None:
    sampler = Sampler()
    for key in range(4):
        begin(sampler, key)
    rows = torch.stack([logits_at(key, 0) for key in range(4)])
    sampler.launch(range(4), rows)
    drawn = sampler.launch(range(4), rows)
    assert sampler.finish(drawn, keys={0, 3}) == [alone(0, 1)[0], alone(3, 1)[0]]
    assert sampler([1, 2], rows[1:3]) == [alone(1, 1)[0], alone(2, 1)[0]]


def test_rows_without_a_choice_are_named_when_they_are_read() -> None:
    sampler, rows = Sampler(), torch.stack([logits_at(key, 0) for key in range(4)])
    for key in range(4):
        begin(sampler, key)
    rows[0, 3], rows[3] = math.nan, -math.inf
    drawn = sampler.launch(range(4), rows)
    with pytest.raises(BadLogitsError) as caught:
        sampler.finish(drawn)
    assert set(caught.value.keys) == {0, 3}
    assert sampler.finish(drawn, keys={1, 2}) == [alone(1, 1)[0], alone(2, 1)[0]]


def test_the_greedy_batch_is_argmax() -> None:
    sampler = Sampler()
    logits = torch.randn(5, SIZE).to(torch.bfloat16)
    for key in range(5):
        sampler.start(key, SamplingParams(temperature=0), [])
    assert [s.token_id for s in sampler(range(5), logits)] == logits.argmax(-1).tolist()


def test_completions_of_one_seed_differ_and_repeat() -> None:
    def run(seed: int | None, index: int) -> list[int]:
        sampler = Sampler()
        sampler.start("a", SamplingParams(seed=seed), [], index)
        return [sampler(["a"], torch.zeros(1, SIZE))[0].token_id for _ in range(20)]

    assert run(1, 0) == run(1, 0)
    assert len({tuple(run(1, index)) for index in range(5)}) == 5
    assert run(None, 0) != run(None, 0)


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 20,000 seeded draws in batches; 7 degrees of freedom: mean 7, deviation 3.7."""
    sampler, counts = Sampler(), torch.zeros(8, dtype=torch.float64)
    logits = torch.tensor([0.0, 1.0, 2.0, 0.5, -1.0, 1.5, 0.2, 0.9])
    for key in range(200):
        sampler.start(key, SamplingParams(seed=key, temperature=0.7), [])
    for _ in range(100):
        for sampled in sampler(range(200), logits.expand(200, -1)):
            counts[sampled.token_id] += 1
    expected = 20_000 * (logits.double() / 0.7).softmax(-1)
    assert 0.5 < float(((counts - expected) ** 2 / expected).sum()) < 25


def test_penalties_push_away_what_was_said() -> None:
    sampler = Sampler()
    sampler.start("a", SamplingParams(temperature=0, presence_penalty=2.0), [])
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    assert [sampler(["a"], logits)[0].token_id for _ in range(4)] == [0, 1, 0, 0]  # 3; 1 < 2; 1 > 0, and no lower
    assert logits.tolist() == [[3.0, 2.0, 1.0]]


def test_logprobs_are_those_of_the_model() -> None:
    """Neither penalty nor bias nor temperature shows in them."""
    sampler, logits = Sampler(), torch.randn(3, SIZE)
    for key, n in enumerate((None, 0, 4)):
        sampler.start(key, SamplingParams(temperature=0.3, seed=0, logit_bias={7: 100}, logprobs=n), [])
    none, own, four = sampler(range(3), logits)
    logprobs = logits.double().log_softmax(-1)
    assert (none.token_id, none.logprob, none.top) == (7, None, ())
    assert own.top == ()
    assert own.logprob == pytest.approx(logprobs[1, 7].item(), abs=1e-5)
    order = logprobs[2].argsort(descending=True)[:4].tolist()
    assert [token for token, _ in four.top] == order
    assert [value for _, value in four.top] == pytest.approx(logprobs[2, order].tolist(), abs=1e-5)


@given(rows=st.integers(1, 150), seed=st.integers(0, 99), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_scores_of_a_prompt(rows: int, seed: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, 9, generator=g).to(dtype)
    tokens, top = (torch.randint(0, 9, (rows,), generator=g).tolist() for _ in range(2))
    for row, token, n, (value, likeliest) in zip(logits, tokens, top, score_tokens(logits, tokens, top), strict=True):
        total = math.log(sum(math.exp(x) for x in row.tolist()))
        assert value == pytest.approx(row[token].item() - total, abs=1e-5)
        order = sorted(range(9), key=lambda i: (-row[i].item(), i))[:n]
        assert [i for i, _ in likeliest] == order


def sampled_from(row: Tensor) -> Sampled:
    sampler = Sampler()
    sampler.start("x", SamplingParams(seed=3), [])
    return sampler(["x"], row[None])[0]


def test_a_row_without_a_choice_names_its_key_and_changes_nothing() -> None:
    sampler = Sampler()
    for key in "abcd":
        sampler.start(key, SamplingParams(seed=3), [])
    logits = torch.randn(4, SIZE)
    expected = [s.token_id for s in (sampled_from(logits[i]) for i in (0, 3))]
    logits[1, 5], logits[2] = float("nan"), float("-inf")
    with pytest.raises(BadLogitsError, match="no token") as caught:
        sampler([*"abcd"], logits)
    assert caught.value.keys == ("b", "c")
    assert [s.token_id for s in sampler(["a", "d"], logits[[0, 3]])] == expected


def test_all_rows_without_a_choice_are_named_at_once() -> None:
    """One as the model gave it, one by its penalty; without them the third goes on."""
    sampler = Sampler()
    sampler.start("nan", SamplingParams(temperature=0), [])
    sampler.start("huge", SamplingParams(temperature=0, repetition_penalty=0.01), [0])
    sampler.start("fine", SamplingParams(temperature=0), [])
    logits = torch.tensor([[1.0, float("nan")], [3e38, 0.0], [0.0, 1.0]])
    with pytest.raises(BadLogitsError) as caught:
        sampler(["nan", "huge", "fine"], logits)
    assert caught.value.keys == ("nan", "huge")
    assert sampler(["fine"], logits[2:])[0].token_id == 1


def test_nothing_is_remembered_of_what_is_over() -> None:
    sampler = Sampler()
    for key in range(3):
        sampler.start(key, SamplingParams(presence_penalty=1), [])
    sampler([0, 1, 2], torch.randn(3, SIZE))
    for key in (2, 0, 1, 1):
        sampler.stop(key)
    assert len(sampler) == 0
    assert sampler([], torch.empty(0, SIZE)) == []


@pytest.mark.parametrize(
    ("params", "name"),
    [
        (SamplingParams(logit_bias={30: 1.0}), "logit_bias"),
        (SamplingParams(stop_token_ids=(4, -1)), "stop_token_ids"),
        (SamplingParams(allowed_token_ids=(0, 30)), "allowed_token_ids"),
    ],
)
def test_tokens_that_the_model_lacks_are_refused(params: SamplingParams, name: str) -> None:
    with pytest.raises(OptionError, match=f"{name} names token .* 0 to 29"):
        Sampler().check(params, SIZE)


def test_the_last_token_of_the_vocabulary_is_one() -> None:
    Sampler().check(SamplingParams(logit_bias={SIZE - 1: 1.0}, stop_token_ids=(0,)), SIZE)
