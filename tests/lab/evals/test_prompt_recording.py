"""A prompt that is read once for many settings gives each what it would have read itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from millpond.hf.compress import compress
from millpond.kernels.decode_rules import Reduce
from millpond_lab.evals.decoding import prompt_recording
from millpond_lab.evals.decoding.batch import BatchReader
from millpond_lab.evals.decoding.prompt_recording import PromptRecording, PromptRecordings
from millpond_lab.evals.decoding.record import Protocol
from millpond_lab.evals.harness.plan import EvalPlan
from millpond_lab.evals.harness.run import run
from millpond_lab.evals.spec import parse_specs
from millpond_lab.evals.task import TASKS, task
from tests.helpers.engine.sessions import model as coded_model
from tests.helpers.evals.small import TinyTask, examined, tiny_model, tiny_samples, tiny_tokenizer
from tests.helpers.random_heads import random_heads_where_none_are

OPENINGS = (tuple(range(5, 65)), tuple(range(9, 40)))
#: Methods, budgets and formats that act at the end of a prompt, whatever they look at.
SETTINGS = [
    ("full", "", "auto"),
    ("full", "", "int8"),
    ("full", "", "rotated4"),
    ("h2o", "30%", "auto"),
    ("h2o:reduce=max", "40", "int8"),
    ("snapkv:window=4", "30%", "auto"),
    ("ada", "40", "auto"),
    ("keydiff", "30%", "auto"),
    ("expected_attention", "30%", "auto"),
    ("kvzip:ask=none", "30%", "auto"),
    ("d2o", "40%", "auto"),
    ("fastgen", "", "auto"),
]
#: Those that change what the model computes inside the prompt, so that each reads for itself.
INSIDE = [("locret:prefill=chunks:chunk=8", "12"), ("streaming", "9"), ("sirllm", "9"), ("h2o:prefill=greedy", "9")]


@contextmanager
def passes(model: LlamaForCausalLM) -> Iterator[list[int]]:
    """The tokens of each pass of a model inside the block."""
    seen: list[int] = []

    def see(module: Any, args: Any, kwargs: Any) -> None:
        seen.append(kwargs["input_ids"].shape[1])

    hook = model.register_forward_pre_hook(see, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


def recorded(model: LlamaForCausalLM, openings: tuple[tuple[int, ...], ...] = OPENINGS) -> PromptRecording:
    recording = PromptRecording(openings)
    with compress(model, "full") as cache, recording.of(model, cache, hidden=False):
        recording.take(BatchReader(model, cache, openings))
    return recording


@pytest.mark.parametrize(("spec", "budget", "codec"), SETTINGS)
def test_entries_and_predictions_are_those_of_a_pass_of_its_own(spec: str, budget: str, codec: str) -> None:
    model = tiny_model() if codec == "auto" else coded_model()
    recording = recorded(model)
    (method,) = parse_specs(spec, "method")
    found = []
    for given in (None, recording):
        tokenizer = tiny_tokenizer()
        with compress(model, method.name, budget or None, codec, tokenizer=tokenizer, **method.options) as cache:
            with passes(model) as seen:
                reader = BatchReader(model, cache, OPENINGS, given)
            assert (max(map(len, OPENINGS)) in seen) is (given is None)
            kept = [cache.positions(layer, row) for layer in cache.entry_layers for row in (0, 1)]
            reader.feed([[7, 8, 9], [5]])
            reader.feed([[6], [7]])
            found.append((kept, reader.held(), reader.seen, reader.logits, cache.text.ids))
    own, other = found
    assert own[:3] == other[:3]
    assert torch.equal(own[4], other[4])
    torch.testing.assert_close(own[3], other[3], atol=2e-3 if codec == "rotated4" else 0, rtol=0)


@pytest.mark.parametrize(("spec", "budget"), INSIDE)
def test_what_acts_inside_the_prompt_reads_for_itself(spec: str, budget: str) -> None:
    model = tiny_model()
    recording = recorded(model)
    (method,) = parse_specs(spec, "method")
    with compress(model, method.name, budget, **method.options) as cache, passes(model) as seen:
        assert not recording.fits(cache)
        BatchReader(model, cache, OPENINGS, recording)
    assert seen[0] == max(map(len, OPENINGS))


def test_attention_is_computed_once_for_each_kind_of_sums() -> None:
    model = tiny_model()
    recording = recorded(model)
    for method in ("h2o", "h2o", "snapkv:window=4", "d2o"):
        (spec,) = parse_specs(method, "method")
        with compress(model, spec.name, 9, **spec.options) as cache:
            BatchReader(model, cache, OPENINGS, recording)
    layers = recording.layers.values()
    kinds = {(reduce, decay) for layer in layers for _, reduce, decay in layer.attended}
    assert kinds == {(None, 1.0), (Reduce.MEAN, 1.0)}
    for layer in layers:
        outputs = {id(out) for out, _, _ in layer.attended.values()}
        assert len(outputs) == len(OPENINGS), "one output for each sequence"


def test_nothing_is_recorded_beyond_the_most_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    monkeypatch.setattr(prompt_recording, "MOST_BYTES", recorded(model).layers[0].nbytes)
    recording = recorded(model)
    assert recording.done
    assert not recording.layers
    with compress(model, "h2o", 9) as cache, passes(model) as seen:
        reader = BatchReader(model, cache, OPENINGS, recording)
        assert reader.seen == [len(opening) for opening in OPENINGS]
    assert seen == [max(map(len, OPENINGS))]


def test_a_run_tries_once_to_record_what_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_recording, "MOST_BYTES", 100)
    task, shared = TinyTask(items=tiny_samples(3)), PromptRecordings(hidden=False)
    model = tiny_model()
    with passes(model) as alone:
        expected = examined(task, "h2o", "9", "agnostic", size=3, model=model)
    with passes(model) as seen:
        assert examined(task, "h2o", "9", "agnostic", size=3, model=model, recordings=shared) == expected
    assert len(seen) == len(alone) + 1


@pytest.mark.in_turns(0, of=5)
@pytest.mark.parametrize("protocol", ["aware", "agnostic", "turns"])
@pytest.mark.parametrize("kind", ["generate", "choice", "perplexity", "fidelity"])
def test_records_are_those_without_recordings(kind: Any, protocol: Protocol) -> None:
    task = TinyTask(kind, tiny_samples(3))
    shared = PromptRecordings(hidden=False)
    for method, budget in (("full", ""), ("h2o", "30%"), ("snapkv:window=4", "9")):
        alone = examined(task, method, budget, protocol, size=4)
        assert alone == examined(task, method, budget, protocol, size=4, recordings=shared)


def test_a_run_reads_each_batch_once(tmp_path: Path) -> None:
    TASKS.names()

    @task("tiny_texts")
    def tiny_texts() -> TinyTask:
        """Answers by decoding."""
        return TinyTask(items=tiny_samples(3))

    model = tiny_model()
    settings = [("full", "", "auto"), ("h2o", "30%", "auto"), ("tova", "9", "auto")]
    plan = EvalPlan(
        "tiny",
        parse_specs("full,h2o,tova", "method"),
        parse_specs("tiny_texts", "tasks"),
        budgets=["30%", "9"],
        protocols=["agnostic"],
        samples=3,
        batch_size=3,
        only=settings,
    )
    assert [(cell.method, cell.budget, cell.codec) for cell in plan.cells()] == settings
    try:
        with passes(model) as seen:
            rows = run(plan, model, tiny_tokenizer(), tmp_path)
    finally:
        del TASKS._entries["tiny_texts"]
    assert len(rows) == len(settings)
    assert sum(tokens > 20 for tokens in seen) == 3, seen


def test_what_attention_modules_read_is_recorded_where_a_method_asks_for_it() -> None:
    model = tiny_model()
    recordings = []
    for hidden in (False, True):
        recording = PromptRecording(OPENINGS)
        with compress(model, "full") as cache, recording.of(model, cache, hidden):
            recording.take(BatchReader(model, cache, OPENINGS))
        recordings.append(recording)
    found = []
    for recording in (None, recordings[1]):
        with random_heads_where_none_are(), compress(model, "kvzap") as cache, passes(model) as seen:
            assert not recordings[0].fits(cache)
            reader = BatchReader(model, cache, OPENINGS, recording)
            assert bool(seen) is (recording is None)
            found.append([cache.positions(layer, row) for layer in cache.entry_layers for row in (0, 1)])
            assert reader.seen == [len(opening) for opening in OPENINGS]
    assert found[0] == found[1]
