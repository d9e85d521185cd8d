"""Gates with an adapter: training, file, and that it acts as merged weights do, in a cache and in the engine."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.nn import functional as F

import millpond as mp
from millpond.engine.engine import Engine
from millpond.engine.request import CacheOptions, Request
from millpond.errors import CacheMismatchError, DataError, OptionError, UnsupportedModelError
from millpond.hf.adapter import acting, projections_of
from millpond.hf.calibration.load import model_mark
from millpond.hf.model_profile import ModelProfile
from millpond.hf.retaining_heads import gates_finder
from millpond.policy.trained.adapter import Adapter, LowRank
from millpond.policy.trained.file import gates_of, save_heads
from millpond.policy.trained.networks import Gates
from millpond_lab.bench.methods.candidate import random_gates
from millpond_lab.train.gate.card import calibrate_gates, write_card
from millpond_lab.train.gate.low_rank import projection_sizes
from millpond_lab.train.gate.objective import TrainedGate
from millpond_lab.train.gate.shares import GateJudge, flags_of
from millpond_lab.train.gate.train import GateSettings, TrainedGates, start_of, train_gate
from millpond_lab.train.retain.features import TextReader
from millpond_lab.train.retain.texts import Asked
from tests.cli.test_cli import wrong
from tests.helpers.engine.helpers import add, greedy
from tests.helpers.hf.families import shared_model
from tests.helpers.matrix.models import llama, prompts
from tests.lab.train.test_gate import TINY
from tests.lab.train.test_retain import Random

LORA = replace(TINY, lora=2, teacher="text")
CHANGED = {"q_proj", "k_proj", "v_proj", "o_proj"}


def adapter_of(model: Any, rank: int = 3, size: float = 0.3) -> Adapter:
    """A random adapter; size 0: with B = 0."""
    draw = torch.Generator().manual_seed(5)

    def one(inputs: int, outputs: int) -> LowRank:
        shapes = ((rank, inputs), (outputs, rank))
        a, b = (torch.randn(*shape, generator=draw).bfloat16().float() for shape in shapes)
        return LowRank(a * inputs**-0.5, b * size)

    sizes = projection_sizes(ModelProfile.of(model))
    return Adapter([{name: one(*given) for name, given in layer.items()} for layer in sizes])


def file_of(model: Any, path: Path, adapter: Adapter | None) -> str:
    gates = random_gates(model)
    save_heads(Gates(gates.layers, gates.model, gates.name, adapter=adapter), path)
    return str(path)


def merged(model: Any, adapter: Adapter) -> Any:
    """The model with the adapter in its weights."""
    found = copy.deepcopy(model)
    with torch.no_grad():
        for layer, added in zip(projections_of(ModelProfile.of(found)), adapter.layers, strict=True):
            for name, one in added.items():
                layer[name].weight += (one.b.bfloat16().float() @ one.a.bfloat16().float()).to(layer[name].weight)
    return found


def written(model: Any, gate: str, **options: Any) -> tuple[Tensor, list[Any]]:
    """Logits of a prompt and six tokens behind it, and what is kept."""
    ids, logits = prompts(1, 60)[0], []
    with torch.no_grad(), mp.compress(model, "attention_gate", gate=gate, window=4, chunk=16, **options) as cache:
        for begin, end in ((0, 54), *((n, n + 1) for n in range(54, 60))):
            logits.append(model(ids[:, begin:end], cache=cache).logits[0])
        return torch.cat(logits), [cache.positions(layer) for layer in range(2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_b_of_zero_it_is_the_plain_gate(tmp_path: Path, dtype: torch.dtype) -> None:
    """To the bit, where both pass the model's modules."""
    model = llama(dtype=dtype)
    plain = file_of(model, tmp_path / "plain.safetensors", None)
    zero = file_of(model, tmp_path / "zero.safetensors", adapter_of(model, size=0.0))
    found, expected = (written(model, gate, native_layers=False) for gate in (zero, plain))
    assert torch.equal(found[0], expected[0])
    assert found[1] == expected[1]


@pytest.mark.parametrize("acts", ["prompt", "end"])
def test_it_acts_as_merged_weights_do(tmp_path: Path, acts: str) -> None:
    """Flags, entries and logits; other caches of the model and passes without one see nothing of it."""
    model = llama()
    adapter, ids = adapter_of(model), prompts(1, 60)[0]
    other = merged(model, adapter)
    gate = file_of(model, tmp_path / "gate.safetensors", adapter)
    gates = random_gates(model)
    save_heads(Gates(gates.layers, model_mark(other), gates.name), tmp_path / "merged.safetensors")
    found, expected = written(model, gate, acts=acts), written(other, str(tmp_path / "merged.safetensors"), acts=acts)
    assert torch.allclose(found[0], expected[0], atol=1e-4)  # it is stored in bfloat16, and acts in the model's dtype
    assert found[1] == expected[1]
    plain = written(model, file_of(model, tmp_path / "plain.safetensors", None), acts=acts)
    assert not torch.allclose(found[0], plain[0], atol=1e-2)
    with torch.no_grad(), mp.compress(model, "attention_gate", gate=gate), mp.compress(model, "full") as full:
        alone = model(ids).logits
        beside = model(ids, cache=full).logits
    assert torch.equal(alone, model(ids).logits)
    assert torch.allclose(beside, alone, atol=1e-8)
    assert not any(module._forward_hooks for module in model.modules())


def test_requests_of_one_pass_have_adapters_of_their_own(tmp_path: Path) -> None:
    """Rows of other requests are read by the model as it is, in one pass with those of gates."""
    model = llama(dtype=torch.float32)
    gate = file_of(model, tmp_path / "gate.safetensors", adapter_of(model))
    gated = {"gate": gate, "window": 4}
    asked = [("attention_gate", gated, 40), ("full", {}, 55), ("attention_gate", gated, 33), ("full", {}, 21)]
    expected, found = {}, {}
    with closing(Engine(model, method="full", page_slots=4)) as engine:
        for method, options, n in asked:
            ids = prompts(1, n, n)[0]
            with mp.compress(model, method, **options):
                expected[str(n)] = model.generate(ids, max_new_tokens=6, do_sample=False)[0, n:].tolist()
            cache = CacheOptions(method=method, options=options)
            add(engine, Request(request_id=str(n), prompt=tuple(ids[0].tolist()), params=greedy(6), cache=cache))
        while engine.busy:
            for output in engine.step():
                assert output.error is None
                if output.finished:
                    found[output.request_id] = list(output.completions[0].token_ids)
            engine.check_integrity()
    assert found == expected
    with mp.compress(model, "attention_gate", **gated | {"gate": file_of(model, tmp_path / "plain.safetensors", None)}):
        plain = model.generate(prompts(1, 40, 40)[0], max_new_tokens=6, do_sample=False)[0, 40:].tolist()
    assert plain != expected["40"]


def test_an_engine_without_the_modules_refuses_it(tmp_path: Path) -> None:
    model = llama(dtype=torch.float32)
    gate = file_of(model, tmp_path / "gate.safetensors", adapter_of(model))
    with pytest.raises(OptionError, match=r"an adapter \(--lora\), which acts in the model's modules"):
        mp.LLM(model, method="attention_gate", options={"gate": gate}, deterministic=True)


def test_a_model_that_bypasses_its_modules_is_refused(tmp_path: Path) -> None:
    model = copy.deepcopy(llama(dtype=torch.float32))
    gate = file_of(model, tmp_path / "gate.safetensors", adapter_of(model))
    linear = model.model.layers[1].self_attn.q_proj
    linear.__class__ = type("Bypass", (torch.nn.Linear,), {"__call__": lambda self, x: F.linear(x, self.weight)})
    with (
        torch.no_grad(),
        mp.compress(model, "attention_gate", gate=gate) as cache,
        pytest.raises(UnsupportedModelError, match="passed 7 of its 8 projections"),
    ):
        model(prompts(1, 20)[0], cache=cache)


# ---------------------------------------------------------------------- training


class Same:
    """Texts of one token, which a model can learn to continue."""

    name = "one token"

    def draw(self, stream_name: str, seed: int, step: int) -> Asked:
        return Asked(torch.full((24,), 7), 16)


def train(out: Path, settings: GateSettings = LORA, **more: Any) -> TrainedGates:
    return train_gate(llama(dtype=torch.float32), Random(), out, settings, show_progress=False, **more)


def test_the_loss_falls_by_the_adapter(tmp_path: Path) -> None:
    """Cross entropy of texts that the model does not know: gates alone do not learn them."""
    settings = replace(LORA, steps=30, lr=3e-2, checkpoint_steps=60, check_texts=1, lora=4)
    model = copy.deepcopy(llama(dtype=torch.float32))
    with torch.no_grad():
        model.lm_head.weight *= 20  # so that a prediction can be sure
    before = [part.clone() for part in model.parameters()]
    with_adapter, alone = (
        train_gate(model, Same(), tmp_path / f"{n}.safetensors", replace(settings, lora=n), show_progress=False).run.log
        for n in (4, 0)
    )
    assert with_adapter[-1].predicted < 0.5 * with_adapter[0].predicted
    assert with_adapter[-1].predicted < 0.5 * alone[-1].predicted
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def test_interrupted_and_resumed_it_is_the_same_file(tmp_path: Path) -> None:
    settings = replace(LORA, steps=4, check_texts=1, checkpoint_steps=2)
    train(tmp_path / "whole.safetensors", settings)
    for stop in (3, None):
        train(tmp_path / "parts.safetensors", settings, max_steps=stop)
    content = (tmp_path / "whole.safetensors").read_bytes()
    assert content == (tmp_path / "parts.safetensors").read_bytes()


def test_what_is_trained_is_stored_and_used(tmp_path: Path) -> None:
    """The cache keeps what training measured, with the adapter of the file; calibrated again it stays there."""
    out, model = tmp_path / "gate.safetensors", llama(dtype=torch.float32)
    result = train(out, replace(LORA, lr=5e-2))
    gates = gates_of(out.read_bytes(), "it")
    assert gates.adapter is not None
    assert gates.adapter.rank == 2
    assert set(gates.adapter.layers[1]) == CHANGED
    assert gates.digest == result.gates.digest != replace(gates, adapter=None).digest
    assert gates.facts["lora"] == "2"
    asked = Random().draw("any", 0, 1)
    judged, plain = (
        GateJudge(TextReader(model), "prompt", TINY.sinks, TINY.window, adapter).judge(gates.layers, asked)
        for adapter in (gates.adapter, None)
    )
    with torch.no_grad(), mp.compress(model, "attention_gate", gate=str(out), sinks=2, window=3) as cache:
        model(asked.ids[None, : asked.begin], cache=cache)
        for layer, found in enumerate(judged.logits):
            flags = flags_of(found, TINY.sinks, TINY.window)
            for head, held in enumerate(cache.positions(layer)):
                assert held == torch.nonzero(flags[head]).flatten().tolist()
        logits = model(asked.ids[None, asked.begin :], cache=cache).logits[0]
    assert torch.allclose(logits, judged.predicted, atol=1e-3)
    assert not torch.allclose(logits, plain.predicted, atol=1e-2)
    assert "adapter of rank 2" in write_card(result, out, name="tiny", hardware="a test")
    again = tmp_path / "again.safetensors"
    moved = calibrate_gates(
        model, gates_finder(model)(gates), Random(), again, target=0.5, n_texts=3, sinks=2, window=3
    )
    assert sum(moved.after) / 3 == pytest.approx(0.5, abs=0.1)
    stored = gates_of(again.read_bytes(), "it").adapter
    assert stored is not None
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(stored.parts(), gates.adapter.parts(), strict=True))


def test_gates_begin_with_gates(tmp_path: Path) -> None:
    """With their numbers, widths and adapter; an adapter is not lost on the way."""
    given_adapter = adapter_of(llama())
    start = replace(random_gates(llama(dtype=torch.float32)), adapter=given_adapter)
    settings = replace(LORA, lora=3, check_texts=1, start=start_of(start))
    result = train(tmp_path / "gate.safetensors", settings, start=start, max_steps=0)
    assert result.gates.adapter is not None
    for own, given, added in zip(result.run.networks, start.layers, given_adapter.layers, strict=True):
        assert isinstance(own, TrainedGate)
        assert own.adapter is not None
        assert all(torch.equal(getattr(own.gate, part), getattr(given, part)) for part in given.PARTS)
        assert all(
            torch.equal(a, b) for name in added for a, b in zip(own.adapter.added[name], added[name], strict=True)
        )
    assert "begin as gates of the same model" in write_card(
        result, tmp_path / "gate.safetensors", name="a", hardware="b"
    )
    with pytest.raises(CacheMismatchError, match=r"have an adapter of rank 3.*give --lora 3"):
        train(tmp_path / "other.safetensors", replace(settings, lora=0), start=start)
    with pytest.raises(CacheMismatchError, match="trained for another model"):
        train(tmp_path / "other.safetensors", settings, start=random_gates(llama("mha")))


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(OptionError, match=r"lora=2 with acts='end'.*acts='prompt'"):
        replace(LORA, acts="end")
    with pytest.raises(OptionError, match="lora=-1 is the rank"):
        replace(LORA, lora=-1)
    said = wrong("train", "gate", "--out", "a.safetensors", "--data", "recall", "--lora", "2", "--acts", "end")
    assert "lora=2 with acts='end'" in said


# ---------------------------------------------------------------------- files


def test_files_of_other_models(tmp_path: Path) -> None:
    model = llama()
    gate = file_of(model, tmp_path / "gate.safetensors", adapter_of(model))
    with pytest.raises(CacheMismatchError, match="trained for another model"):
        mp.compress(llama("mha"), "attention_gate", gate=gate)
    for adapter, message in (
        (adapter_of(llama("mha")), r"adds \(32, 16\) numbers to q_proj of layer 0, which LlamaForCausalLM has as"),
        (Adapter(adapter_of(model).layers[:1]), "is of 1 layers, and LlamaForCausalLM has 2"),
        (Adapter([{"w_proj": layer["q_proj"]} for layer in adapter_of(model).layers]), "has as None"),
    ):
        gates = random_gates(model)
        with pytest.raises(CacheMismatchError, match=message):
            gates_finder(model)(Gates(gates.layers, gates.model, gates.name, adapter=adapter))
    with pytest.raises(UnsupportedModelError, match=r"no linear maps.*leave --lora out"):
        projection_sizes(ModelProfile.of(shared_model("gpt2")))


def rewritten(content: bytes, tensors: Mapping[str, Tensor | None], **about: str) -> bytes:
    """The same file with other tensors (None: without) and metadata."""
    length = int.from_bytes(content[:8], "little")
    old = json.loads(content[8 : 8 + length])["__metadata__"]
    new = {name: tensor for name, tensor in (load(content) | tensors).items() if tensor is not None}
    return save(new, {**old, **about})


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda c: rewritten(c, {}, format="millpond heads 1"), "tensors do not make 2 layers"),
        (lambda c: rewritten(c, {}, format="millpond heads 3"), "its format is 'millpond heads 3'"),
        (lambda c: rewritten(c, {}, layers="1000000000000"), "do not make 1000000000000 layers"),
        (lambda c: rewritten(c, {"1.lora.q_proj.b": None}), "do not make an adapter of 2 layers"),
        (lambda c: rewritten(c, {"0.lora.k_proj.c": torch.zeros(3, 3)}), "do not make an adapter of 2 layers"),
        (lambda c: rewritten(c, {"2.lora.k_proj.a": torch.zeros(3, 3)}), "do not make an adapter of 2 layers"),
        (lambda c: rewritten(c, {"0.lora.q_proj.a": torch.zeros(2, 32)}), "matrices of the ranks 2 and 3"),
        (lambda c: rewritten(c, {"0.lora.q_proj.a": torch.zeros(3)}), "is broken"),
        (
            lambda c: rewritten(c, {"0.lora.q_proj.a": torch.zeros(0, 32), "0.lora.q_proj.b": torch.zeros(64, 0)}),
            "matrices of the ranks 0 and 0",
        ),
        (
            lambda c: rewritten(c, {"0.lora.q_proj.a": torch.zeros(2, 32), "0.lora.q_proj.b": torch.zeros(64, 2)}),
            "an adapter of several ranks",
        ),
        (
            lambda c: rewritten(c, {f"{i}.lora.__class__.{p}": torch.zeros(3, 3) for i in range(2) for p in "ab"}),
            "projections that no model has",
        ),
        (lambda c: rewritten(c, {"1.lora.v_proj.b": torch.full((16, 3), torch.nan)}), "layer 1 has numbers that are"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, broken: Callable[[bytes], bytes], message: str) -> None:
    model = llama()
    content = Path(file_of(model, tmp_path / "gate.safetensors", adapter_of(model))).read_bytes()
    assert gates_of(content, "it").adapter is not None
    with pytest.raises(DataError, match=message):
        gates_of(broken(content), "it")


def test_adapters_act_inside_the_block_alone() -> None:
    model, ids = llama(), prompts(1, 12)[0]
    with torch.no_grad():
        before = model(ids).logits
        with acting(ModelProfile.of(model), [(adapter_of(model), [slice(4, 12)])]):
            changed = model(ids).logits
        assert torch.equal(model(ids).logits, before)
    assert torch.equal(changed[:, :4], before[:, :4])
    assert not torch.allclose(changed[:, 4:], before[:, 4:])
