"""What a step asks of its device: on tensors without numbers (meta), of which each look at a number is an error."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from millpond.cache.layer.decode_step import NanCheck
from millpond.engine.engine import Engine
from millpond.engine.request import Request
from millpond.engine.sampling.params import SamplingParams
from millpond.engine.sampling.sampler import Drawn, Sampler
from millpond.engine.step_executor import StepExecutor
from millpond.kernels.transfers import ReadBack, on_device
from millpond.models.lean.decoder import Decoder
from millpond.runner.native_forward import DecodeGraph
from tests.engine import test_codecs
from tests.engine.test_lengths_behind import CASES
from tests.helpers.device_memory import set_apart

SIZE = 600  # more than the short cut of top-p reads
MIXED = [
    SamplingParams(temperature=0),
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.4, top_p=0.8, logprobs=3),
    SamplingParams(seed=3, top_k=4, repetition_penalty=1.4),
    SamplingParams(temperature=0, frequency_penalty=2.0, logprobs=0),
    SamplingParams(seed=4, min_p=0.2, logit_bias={3: 4.0}),
    SamplingParams(seed=5, presence_penalty=1.0, top_p=0.5),
    SamplingParams(seed=6, typical_p=0.4, top_k=30),
    SamplingParams(seed=7, min_tokens=3, stop_token_ids=(2, 5), allowed_token_ids=(2, 5, 7, 8)),
]
UPLOADS = ("penalties", "token_choice", "sampler", "token_scores", "banned_tokens")


class Recorder(TorchDispatchMode):
    """Counts operations that wait for a device, or copy from or to it, also those that bring an index there."""

    WAITS = ("aten._local_scalar_dense", "aten.nonzero", "aten.item", "aten.is_nonzero", "aten.equal")

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).rsplit(".", 1)[0]
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_host = any(x.device.type == "cpu" and x.ndim for x in tensors)
        there = any(x.device.type == "meta" for x in tensors)
        if there and (name in self.WAITS or on_host):
            self.counts[name] += 1
        out = func(*args, **(kwargs or {}))
        if name == "aten._to_copy" and out.device != args[0].device:
            self.counts[name] += 1
        return out


class Reads:
    """In place of `ReadBack`: takes note of what would be read."""

    found: ClassVar[list[list[Tensor]]] = []

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.found.append(list(tensors))


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Uploads give tensors of a device without numbers, and are counted."""
    counts: Counter[str] = Counter()
    for name in UPLOADS:
        module = importlib.import_module(f"millpond.engine.sampling.{name}")

        def upload(source: np.ndarray | Tensor, device: torch.device, name: str = name) -> Tensor:
            tensor = torch.from_numpy(source) if isinstance(source, np.ndarray) else source
            if device.type == "cpu" or tensor.is_meta:
                return tensor
            counts[name] += 1
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

        monkeypatch.setattr(module, "on_device", upload)
    monkeypatch.setattr(importlib.import_module("millpond.engine.sampling.sampler"), "ReadBack", Reads)
    monkeypatch.setattr(Reads, "found", [])
    return counts


def launched(keys: Sequence[int], params: Sequence[SamplingParams], ahead: bool) -> tuple[Counter[str], Drawn]:
    sampler = Sampler()
    for key in keys:
        known = (4,) if params[key] == MIXED[0] else ()
        sampler.start(key, params[key], [1, 2, 3], bans=sampler.bans_of(params[key]), known=known)
    with Recorder() as recorder:
        logits = torch.empty(len(keys), SIZE, device="meta", dtype=torch.bfloat16)
        newest = torch.empty(len(keys), dtype=torch.int64, device="meta") if ahead else None
        drawn = sampler.launch(keys, logits, newest)
    return recorder.counts, drawn


@pytest.mark.parametrize("kernels", ["reference", "gpu"])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_sampling_step_is_read_once(
    kernels: str, ahead: bool, pretended: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All parameters but grammars: launched without a wait or a plain copy, and read together at the end."""
    monkeypatch.setenv("MILLPOND_KERNELS", kernels)
    if kernels == "gpu":
        pytest.importorskip("triton")
        monkeypatch.setattr(
            importlib.import_module("millpond.kernels.gpu.draw"),
            "draw",
            lambda probs, *_: torch.empty(len(probs), dtype=torch.int64, device=probs.device),
        )
    counts, drawn = launched(range(len(MIXED)), MIXED, ahead)
    assert not counts
    (read,) = Reads.found
    assert read[0] is drawn.tokens
    assert [tuple(tensor.shape) for tensor in read[:3]] == [(len(MIXED),)] * 3
    assert {tensor.device.type for tensor in read} == {"meta"}
    assert [tuple(tensor.shape) for tensor in read[3:]] == [(2,), (2, 20), (2, 20)]


def test_greedy_rows_bring_nothing_to_the_device(pretended: Counter[str]) -> None:
    counts, _ = launched(range(4), [SamplingParams(temperature=0, logprobs=None)] * 4, False)
    assert not counts
    assert pretended == {"sampler": 1}  # the known tokens
    assert len(Reads.found) == 1


WAITS = {
    "a number": lambda x: x.sum().item(),
    "a list": lambda x: x.tolist(),
    "rows by a mask": lambda x: x[x > 0],
    "whether any": lambda x: bool(x.any()),
    "an index of the host": lambda x: x[torch.tensor([0])],
    "a copy": lambda x: torch.empty(3).copy_(x),
}


@pytest.mark.parametrize("wait", WAITS)
def test_the_recorder_sees_each_wait(wait: str) -> None:
    """Or torch does, which refuses to look at numbers that are not there."""
    with Recorder() as recorder:
        try:
            WAITS[wait](torch.empty(3, device="meta"))
        except (NotImplementedError, RuntimeError):
            return
    assert recorder.counts


def test_what_is_read_is_what_was_there() -> None:
    tensors = [torch.arange(4), torch.zeros(0, 2)]
    read = ReadBack(tensors)
    assert read.is_ready()
    assert all(map(torch.equal, read.wait(), tensors))
    assert all(map(torch.equal, read.wait(), tensors))


def test_an_upload_on_the_cpu_is_the_source() -> None:
    source = np.arange(3)
    there = on_device(source, torch.device("cpu"))
    source[0] = 7
    assert there.tolist() == [7, 1, 2]


LOOKS = ("tolist", "item", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__contains__")


@pytest.mark.filterwarnings("ignore::UserWarning")  # a share of a few tokens
@pytest.mark.parametrize(("method", "codec"), [("full", None), ("h2o", None), ("snapkv", None), ("full", "int4")])
def test_a_quiet_step_is_read_once(method: str, codec: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an engine whose steps run ahead: nobody looks at a tensor but who reads the tokens of the step before.

    The pass itself is left out, whose kernels on a CPU are others; so is the check for NaN, which looks at once there.
    """
    monkeypatch.setattr(Engine, "_runs_ahead", True)
    options: dict[str, Any] = {} if codec is None else {"codec": codec}
    model = test_codecs.model()
    engine = Engine(model, method=method, budget=None if method == "full" else "50%", page_slots=32, **options)
    lean = engine._model._lean
    assert lean is not None
    monkeypatch.setattr(Decoder, "in_one_call", lambda self, n: None)
    monkeypatch.setattr(NanCheck, "check", lambda *_: None)
    lean._graph = DecodeGraph(lean._decoder.forward, lambda work, device: work)
    for n in (90, 60):
        params = SamplingParams(max_tokens=30, temperature=0, presence_penalty=1.5)
        engine.add(Request(request_id=str(n), prompt=tuple(range(1, n + 1)), params=params))
    while engine._ahead.n_followed < 3:
        engine.step()
    logits, lse = torch.randn(2, model.config.vocab_size), torch.zeros(2, 2, 4)
    monkeypatch.setattr(lean._graph, "step", lambda *_: (logits, lse))
    looks = looked_at(monkeypatch)
    for _ in range(4):
        engine.step()
        assert looks == {"wait": 1}
        looks.clear()
    assert engine._ahead.n_followed >= 7
    engine.abort_all()
    engine.close()


@pytest.mark.filterwarnings("ignore::UserWarning")  # a share of a few tokens
@pytest.mark.parametrize("case", ["h2o int4", "h2o by layer", "fastgen", "fastgen 40%"])
def test_lengths_that_only_the_device_knows_come_with_the_tokens(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step reads tokens and the sizes of the caches that go with them; lengths are looked at now and then."""
    monkeypatch.setattr(Engine, "_runs_ahead", True)
    counts = set_apart(monkeypatch)
    engine = Engine(test_codecs.model(), **CASES[case], page_slots=32)
    for n in (210, 190):
        prompt = tuple(test_codecs.prompt(n))
        engine.add(Request(request_id=str(n), prompt=prompt, params=SamplingParams(max_tokens=60, temperature=0)))
    while engine._ahead.n_followed < 3:
        engine.step()
    monkeypatch.setattr(NanCheck, "check", lambda *_: None)
    monkeypatch.setattr(NanCheck, "check_layers", lambda *_: None)
    looks, steps = looked_at(monkeypatch, read_alone=True), 40
    real = StepExecutor.launch

    def launch(self: StepExecutor, *given: Any) -> Any:
        before = looks["wait"] - counts["looks"]
        launched = real(self, *given)
        assert looks["wait"] - counts["looks"] == before, "nothing of a step is read before it is settled"
        return launched

    monkeypatch.setattr(StepExecutor, "launch", launch)
    for _ in range(steps):
        engine.step()
    of_shares = looks.pop("tolist", 0)  # of the host's own numbers
    assert of_shares == (2 * steps if "fastgen" in case else 0)
    assert set(looks) <= {"wait", "numpy"}
    assert 2 * steps < looks["wait"] <= 2 * steps + 2 * steps // (32 / 2 - 2)  # of two layers, each half page
    assert engine._ahead.n_followed >= steps
    engine.abort_all()
    engine.close()


def looked_at(monkeypatch: pytest.MonkeyPatch, *, read_alone: bool = False) -> Counter[str]:
    """Counts of looks at numbers of tensors, and of reads; with `read_alone` a read counts as nothing else."""
    looks: Counter[str] = Counter()
    reading: list[None] = []

    def counted(name: str) -> None:
        real = getattr(torch.Tensor, name)

        def look(self: Tensor, *args: Any, **options: Any) -> Any:
            if not reading:
                looks[name] += 1
            return real(self, *args, **options)

        monkeypatch.setattr(torch.Tensor, name, look)

    real_finish, real_wait = Sampler.finish, ReadBack.wait

    def wait(self: ReadBack) -> list[Tensor]:
        looks["wait"] += 1
        reading.extend([None] * read_alone)
        try:
            return real_wait(self)
        finally:
            del reading[len(reading) - read_alone :]

    def finish(self: Sampler, *args: Any, **options: Any) -> Any:
        reading.append(None)
        try:
            return real_finish(self, *args, **options)
        finally:
            reading.pop()

    for name in LOOKS:
        counted(name)
    monkeypatch.setattr(ReadBack, "wait", wait)
    monkeypatch.setattr(Sampler, "finish", finish)
    return looks
