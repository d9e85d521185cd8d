"""Training of gates and head classes: attention with weights, gradients, resume, what is kept, errors, and commands."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig

import millpond as mp
from millpond.errors import CacheMismatchError, NumericsError, OptionError
from millpond.hf.calibration.load import model_mark
from millpond.hf.offline import read_later
from millpond.kernels.args import AttentionShape
from millpond.methods import METHODS
from millpond.policy.trained.file import gates_of
from millpond.policy.trained.networks import LayerGate, quantiles_of
from millpond_lab.train.duo import SAID_AGAIN, SPAN_TOKENS, DuoSettings, RepeatedSpans, train_duo
from millpond_lab.train.gate import train as training
from millpond_lab.train.gate import weighted_attention as weighted
from millpond_lab.train.gate.card import write_card
from millpond_lab.train.gate.objective import (
    TrainedGate,
    gate_loss,
    pinned_entries,
    prediction_loss,
    pruned,
    straight_through,
)
from millpond_lab.train.gate.shares import Acts, GateJudge, flags_of, read_gated, read_inside, share_of
from millpond_lab.train.gate.train import GateSettings, TrainedGates, train_gate
from millpond_lab.train.gate.weighted_attention import masked_attention, weighted_attention
from millpond_lab.train.retain.features import TextReader
from millpond_lab.train.retain.texts import Asked
from tests.cli.test_cli import right, wrong
from tests.helpers.hf.families import shared_model
from tests.helpers.matrix.models import llama
from tests.helpers.random_heads import gates_for
from tests.lab.train.test_retain import Random

TINY = GateSettings(
    steps=9, lr=1e-2, target=0.5, hidden=8, n_heads=2, width=4, sinks=2, window=3, check_texts=3, checkpoint_steps=4
)
SHAPES = {
    "plain": AttentionShape(0.35),
    "softcap": AttentionShape(0.35, softcap=3.0),
    "window": AttentionShape(0.35, window=9),
    "sinks": AttentionShape(0.35, sink_logits=torch.tensor([0.5, 1.0, 2.0, -1.0], dtype=torch.float64)),
}


def train(out: Path, settings: GateSettings = TINY, **more: Any) -> TrainedGates:
    return train_gate(llama(dtype=torch.float32), Random(), out, settings, show_progress=False, **more)


def test_a_global_gate_is_trained_stored_and_used(tmp_path: Path) -> None:
    """A flag of a prompt depends on what follows in it; the file says so, and where a prompt is cut is not chosen."""
    file, model = tmp_path / "gate.safetensors", llama(dtype=torch.float32)
    trained = train(file, replace(TINY, attention="global"))
    gates = gates_of(file.read_bytes(), "gate")
    assert not gates.causal
    assert gates.digest == trained.gates.digest
    assert train(tmp_path / "causal.safetensors", TINY).gates.causal
    reader, draw = TextReader(model), torch.Generator().manual_seed(0)
    ids = torch.randint(3, 90, (30,), generator=draw)
    features = [reader.read_prompt(ids, n).layers[0].features.float() for n in (20, 29)]
    for layers, same in ((gates.layers, False), ([replace(one, causal=True) for one in gates.layers], True)):
        layer = layers[0].to(torch.device("cpu"))
        short, long = (layer.logits(x, *layer.take(x)) for x in features)
        assert torch.allclose(short, long[:, :20], atol=1e-5) is same
    assert "look at the whole prompt" in write_card(trained, file, name="random", hardware="a test").replace("\n", " ")
    answers = []
    for options in ({}, {"max_step_tokens": 8}):
        with mp.LLM(model, method="attention_gate", options={"gate": str(file)}, **options) as llm:
            params = mp.SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
            found = llm.generate([list(range(3, 40)), list(range(5, 30))], params)
            answers.append([(one.completions[0].token_ids, one.completions[0].kv.evicted) for one in found])
    assert answers[0] == answers[1]
    assert all(evicted for _, evicted in answers[0])
    for given in ({"prefill_chunk_size": 16}, {"generation_config": GenerationConfig(prefill_chunk_size=16)}):
        with (
            mp.compress(model, "attention_gate", gate=str(file)),
            pytest.raises(OptionError, match=r"prefill_chunk_size=16 cuts this prompt of 30 tokens.*leave"),
        ):
            model.generate(ids[None], max_new_tokens=1, **given)
    with mp.compress(model, "attention_gate", gate=str(file)):
        assert model.generate(ids[None], max_new_tokens=1, prefill_chunk_size=30).shape[1] == 31


# ---------------------------------------------------------------------- attention to weighted entries


def tokens(n: int, m: int) -> list[Tensor]:
    """q, k, v of m later tokens, and keys and values of a prompt of n."""
    draw = torch.Generator().manual_seed(1)
    shapes = ((4, m), (2, m), (2, m), (2, n), (2, n))
    return [torch.randn(*shape, 3, generator=draw, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("name", SHAPES)
def test_weights_of_zero_hide_entries(name: str) -> None:
    """Against a softmax over what is left, one query at a time."""
    (q, k, v, keys, values), shape = tokens(10, 4), SHAPES[name]
    weights = (torch.rand(2, 10, generator=torch.Generator().manual_seed(2), dtype=torch.float64) > 0.4).double()
    found = weighted_attention(q, k, v, keys, values, weights, shape)
    for h in range(4):
        for i in range(4):
            own = h // 2
            seen = [j for j in range(11 + i) if (j >= 10 or weights[own, j])]
            seen = [j for j in seen if not shape.window or 10 + i - j < shape.window]
            every, each = torch.cat([keys[own], k[own]]), torch.cat([values[own], v[own]])
            logits = every[seen] @ q[h, i] * shape.scale
            if shape.softcap:
                logits = shape.softcap * (logits / shape.softcap).tanh()
            if shape.sink_logits is not None:
                logits = torch.cat([logits, shape.sink_logits[h : h + 1]])
            expected = logits.softmax(0)[: len(seen)] @ each[seen]
            assert torch.allclose(found[h, i], expected, atol=1e-12)


@pytest.mark.parametrize("name", SHAPES)
def test_flags_inside_a_text_and_their_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a softmax over what each query sees, and finite differences; also in blocks of a few rows."""
    monkeypatch.setattr(weighted, "ROWS", 4)
    q, k, v, *_ = tokens(1, 11)
    flags = (torch.rand(2, 11, generator=torch.Generator().manual_seed(2), dtype=torch.float64) > 0.5).double()
    at, shape = torch.arange(11), SHAPES[name]
    always = (at[:, None] - at < 3) | (at < 1)
    found = masked_attention(q, k, v, flags, always, shape)
    mask = (always | (flags > 0)[:, None]) & (at <= at[:, None]) & (at[:, None] - at < (shape.window or 12))
    for head in range(4):
        logits = q[head] @ k[head // 2].T * shape.scale
        if shape.softcap:
            logits = shape.softcap * (logits / shape.softcap).tanh()
        terms = logits.exp() * mask[head // 2]
        total = terms.sum(1, keepdim=True) + (0 if shape.sink_logits is None else shape.sink_logits[head].exp())
        assert torch.allclose(found[head], terms @ v[head // 2] / total, atol=1e-12)
    given = [part.requires_grad_() for part in (q, k, v, flags)]
    assert torch.autograd.gradcheck(lambda *parts: masked_attention(*parts, always, shape), given)


@pytest.mark.parametrize("name", SHAPES)
def test_its_gradient_against_finite_differences(name: str) -> None:
    """Of hidden entries too: what they would have added."""
    weights = torch.tensor([[0.0, 1, 1, 0, 1], [1, 0, 0, 1, 0.5]], dtype=torch.float64)
    given = [part.requires_grad_() for part in (*tokens(5, 3), weights)]
    assert torch.autograd.gradcheck(lambda *parts: weighted_attention(*parts, SHAPES[name]), given)


def test_the_gradient_of_flags_against_finite_differences() -> None:
    """Of the whole loss in the numbers of a gate, where flags move as their probabilities do."""
    torch.manual_seed(0)
    gate, x = TrainedGate(6, 5, 2, 2, 3).double(), torch.randn(12, 6, dtype=torch.float64)
    gate.b2.data.zero_()
    q, k, v, keys, values = tokens(12, 3)
    pinned, full, ids = pinned_entries(12, 2, 3, x.device), torch.randn(3, 12), torch.arange(3)
    before = gate(x).detach()

    def loss(flags: Tensor) -> Tensor:
        out = weighted_attention(q, k, v, keys, values, flags, SHAPES["plain"])
        logits = out.transpose(0, 1).flatten(1) * 3
        predicted = F.kl_div(logits.log_softmax(-1), full.double().softmax(-1), reduction="batchmean")
        return gate_loss(predicted, [flags], 0.31, 2.0)[0]

    def moved() -> Tensor:
        with torch.no_grad():
            flags = (before > 0).double() + gate(x).sigmoid() - before.sigmoid()
            return loss(flags.masked_fill(pinned, 1))

    loss(straight_through(gate(x), pinned)).backward()  # type: ignore[no-untyped-call]
    assert 0 < int((before > 0).sum()) < before.numel()
    assert len(ids) == 3
    for parameter in gate.parameters():
        assert parameter.grad is not None
        for place in range(0, parameter.numel(), 5):
            flat, step = parameter.data.view(-1), 1e-6
            own, found = float(flat[place]), []
            for move in (step, -step):
                flat[place] = own + move
                found.append(float(moved()))
            flat[place] = own
            assert float(parameter.grad.view(-1)[place]) == pytest.approx((found[0] - found[1]) / (2 * step), abs=1e-7)


def test_the_loss_by_hand() -> None:
    flags = [torch.tensor([[1.0, 0, 0, 1]]), torch.tensor([[0.0, 0, 0, 1]])]
    loss, kept = gate_loss(torch.tensor(0.25), flags, 0.125, 2.0)
    assert (float(kept), float(loss)) == (0.375, 0.75)
    even, sure = torch.zeros(2, 2), torch.tensor([[9.0, -9], [0, 0]])
    assert float(prediction_loss(even, even, torch.tensor([0, 1]), "self")) == 0
    p = torch.tensor([9.0, -9]).softmax(0)
    divergence = float((p * (p * 2).log()).sum()) / 2  # of the first token; the second agrees
    assert float(prediction_loss(even, sure, torch.tensor([0, 1]), "self")) == pytest.approx(divergence)
    assert float(prediction_loss(sure, even, torch.tensor([0, 1]), "text")) == pytest.approx(-float(p[1].log()))


@pytest.mark.parametrize("family", ["llama", "mistral", "opt", "gpt_neox", "gemma2"])
def test_later_tokens_with_everything_kept_are_predicted_as_in_one_pass(family: str) -> None:
    model, ids = shared_model(family), torch.randint(5, 90, (40,), generator=torch.Generator().manual_seed(2))
    text = Random().draw("any", 0, 0)._replace(ids=ids, begin=30)
    prompt = TextReader(model).read_prompt(ids, 30)
    flags = [torch.ones(len(layer.keys), 30) for layer in prompt.layers]
    found = read_gated(model, text, prompt, flags)
    assert torch.allclose(found, prompt.logits, atol=2e-4)
    with torch.no_grad():
        assert torch.allclose(prompt.logits, model(ids[None]).logits[0, 30:], atol=2e-4)
    hidden = read_gated(model, text, prompt, [flag * 0 for flag in flags])
    assert not torch.allclose(hidden, prompt.logits, atol=1e-3)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("acts", ["prompt", "end"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_neox", "gemma2"])
def test_what_training_reads_is_what_the_cache_keeps(family: str, acts: Acts) -> None:
    """The masked forward of all layers and real dropping: shares, and predictions to 1e-5 (one chunk, and several)."""
    if acts == "end" and family in ("mistral", "gemma2"):
        pytest.skip("without a budget nothing leaves a sliding window at a prompt's end")
    model, ids = shared_model(family), torch.randint(5, 90, (70,), generator=torch.Generator().manual_seed(2))
    reader, asked = TextReader(model), Asked(ids, 60)
    gates = gates_for(model)
    judged = GateJudge(reader, acts, 2, 3).judge(gates.layers, asked)
    plain = reader.predict(ids, 60)
    for chunk in (256, 16):
        with mp.compress(model, "attention_gate", sinks=2, window=3, acts=acts, chunk=chunk) as cache, torch.no_grad():
            model(ids[None, :60], cache=cache)
            held = [len(head) for layer in range(len(cache.layers)) for head in cache.positions(layer)]
            found = model(ids[None, 60:], cache=cache).logits[0]
        assert torch.allclose(found, judged.predicted, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(found, plain, atol=1e-3)
        if not model.config.to_dict().get("sliding_window"):
            assert sum(held) / len(held) / 60 == pytest.approx(share_of(judged.logits, 2, 3), abs=1e-6)


def test_gradients_flow_through_the_attention_of_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finite differences of a number of the predictions in the gate of the first layer, with probabilities as flags."""

    def wide(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([part.double().transpose(1, 2).flatten(2) for part in (q, k, v)], -1)

    monkeypatch.setattr("millpond_lab.train.retain.features.features_of", wide)
    model, text = copy.deepcopy(shared_model("gpt_neox")).double(), Random().draw("any", 0, 0)  # its norms keep 64 bits
    reader = TextReader(model)
    torch.manual_seed(0)
    gates = [TrainedGate(size.inputs, 5, size.n_kv_heads, 2, 4).double() for size in reader.sizes()]

    def predicted() -> Tensor:
        logits = read_inside(reader, text, lambda layer, x: gates[layer](x.double()).sigmoid(), 2, 3)
        return logits.tanh().square().sum()

    for gate in gates:
        gate.b2.data.zero_()
    predicted().backward()  # type: ignore[no-untyped-call]
    for parameter in (gates[0].w2, gates[0].wq, gates[1].w1):
        assert parameter.grad is not None
        place = int(parameter.grad.abs().argmax())
        flat, step, found = parameter.data.view(-1), 1e-6, []
        own = float(flat[place])
        with torch.no_grad():
            for move in (step, -step):
                flat[place] = own + move
                found.append(float(predicted()))
        flat[place] = own
        assert float(parameter.grad.view(-1)[place]) == pytest.approx((found[0] - found[1]) / (2 * step), rel=1e-4)


def test_a_model_of_another_layout_is_refused() -> None:
    model = llama(dtype=torch.float32)
    with pytest.raises(ValueError, match="from inside"):
        read_later(model, torch.tensor([5, 6]), 3, lambda *given: (_ for _ in ()).throw(ValueError("from inside")))
    assert model.config._attn_implementation == "sdpa"  # it was given back


# ---------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainedGates]:
    out = tmp_path_factory.mktemp("whole") / "gate.safetensors"
    return out, train(out)


def test_interrupted_and_resumed_ends_with_the_same_file(whole: tuple[Path, TrainedGates], tmp_path: Path) -> None:
    out = tmp_path / "gate.safetensors"
    for stop in (3, 4, None):
        result = train(out, max_steps=stop)
        assert result.run.step == (stop or TINY.steps)
    assert out.read_bytes() == whole[0].read_bytes()


def test_another_target_or_model_is_not_resumed(tmp_path: Path) -> None:
    out = tmp_path / "gate.safetensors"
    train(out, max_steps=1)
    with pytest.raises(OptionError, match=r"target 0\.5, not 0\.25"):
        train(out, replace(TINY, target=0.25))
    with pytest.raises(OptionError, match="begun with another model"):
        train_gate(llama("mha", torch.float32), Random(), out, TINY, show_progress=False)


def test_what_is_trained_is_used_and_keeps_the_target(whole: tuple[Path, TrainedGates]) -> None:
    """The cache keeps what training measured, and held-out texts the target in the mean."""
    out, result = whole
    assert gates_of(out.read_bytes(), "it").facts["acts"] == "prompt"
    model, gates = llama(dtype=torch.float32), gates_of(out.read_bytes(), "it")
    assert gates.model == model_mark(model) == result.gates.model
    assert gates.digest == result.gates.digest
    assert (gates.facts["target"], gates.facts["window"]) == ("0.5", "3")
    assert sum(result.shares) / 3 == pytest.approx(0.5, abs=0.01)
    assert sum(map(sum, result.kept)) / 4 == pytest.approx(0.5, abs=0.01)
    asked = Random().draw("any", 0, 1)
    judged = GateJudge(TextReader(model), "prompt", TINY.sinks, TINY.window).judge(gates.layers, asked)
    with torch.no_grad(), mp.compress(model, "attention_gate", gate=str(out), sinks=2, window=3) as cache:
        model(asked.ids[None, : asked.begin], cache=cache)
        for layer, logits in enumerate(judged.logits):
            flags = flags_of(logits, TINY.sinks, TINY.window)
            for head, held in enumerate(cache.positions(layer)):
                assert held == torch.nonzero(flags[head]).flatten().tolist()


def test_training_keeps_what_changes_predictions(tmp_path: Path) -> None:
    """From all kept at first to the target, at a lower loss."""
    settings = replace(TINY, steps=40, hidden=16, target=0.4, lr=3e-2)
    torch.manual_seed(0)
    assert (TrainedGate(20, 16, 2, 2, 4)(torch.randn(99, 20)) > 0).float().mean() > 0.95
    last = train(tmp_path / "gate.safetensors", settings)
    assert last.run.log[-1].kept == pytest.approx(0.4, abs=0.15)
    assert last.run.log[-1].loss < last.run.log[0].loss


def test_units_that_decide_nothing_are_left_out() -> None:
    """Of 64 units three move the logits, one that is always the same goes into the bias, and the others are idle."""
    torch.manual_seed(0)
    x = torch.randn(500, 6)
    gate = LayerGate(*(torch.zeros(shape) for shape in ((8, 6), (4, 6), (4, 6), (64, 14), (64,), (2, 64), (2,))))
    gate.w1[5:8, :6] = torch.randn(3, 6)
    gate.w2[:, 5:8] = torch.randn(2, 3)
    gate.b1[60], gate.w2[:, 60] = 2.0, 0.1
    gate.b2[:] = -0.3
    found = pruned(gate, [gate.hidden(x[:200], *gate.take(x[:200])), gate.hidden(x[200:], *gate.take(x[200:]))])
    assert len(found.b1) == 8
    assert torch.allclose(found.logits(x, *found.take(x)), gate.logits(x, *gate.take(x)), atol=1e-5)
    gate.w2.normal_()
    gate.w1.normal_()
    assert pruned(gate, [gate.hidden(x, *gate.take(x))]) is gate


def test_it_can_begin_with_retaining_heads(tmp_path: Path) -> None:
    """At first the flagged are those of the highest scores, as many as are wanted."""
    model = llama(dtype=torch.float32)
    heads = mp.compress(model, "locret", 48).policy.entry_scores
    assert heads is not None
    asked = Random().draw("any", 0, 0)
    features = TextReader(model).read_prompt(asked.ids, asked.begin).layers[0].features
    own = replace(heads.layers[0], quantiles=quantiles_of(heads.layers[0].raw(features).T))
    gate = TrainedGate(features.shape[1], len(own.b1), 2, 2, 4)
    gate.start_from(own, 0.25)
    flagged = gate(features) > 0
    assert flagged.float().mean() == pytest.approx(0.25, abs=0.03)
    for head in range(2):
        best = own.scores(features)[head].topk(int(flagged[head].sum())).indices
        assert flagged[head][best].all()
    with pytest.raises(CacheMismatchError, match=r"64 wide and these gates 8: give --hidden 64"):
        train(tmp_path / "gate.safetensors", start=heads)
    with pytest.raises(CacheMismatchError, match="another model"):
        train_gate(llama("mha", torch.float32), Random(), tmp_path / "a", TINY, start=heads, show_progress=False)


def test_nan_stops_at_the_last_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out, calls, loss = tmp_path / "gate.safetensors", [], prediction_loss

    def broken(*given: Any) -> Tensor:
        calls.append(1)
        return loss(*given) * (float("nan") if len(calls) == 7 else 1)

    monkeypatch.setattr(training, "prediction_loss", broken)
    with pytest.raises(NumericsError, match=r"loss of step 6 is nan; .*checkpoint has the last good one"):
        train(out)
    monkeypatch.undo()
    assert train(out, max_steps=5).run.step == 5  # it stood at 4


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(OptionError, match=r"target=1\.5 is a share"):
        GateSettings(target=1.5)
    with pytest.raises(OptionError, match="teacher='others' must be self or text"):
        GateSettings(teacher="others")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="acts='turn' must be prompt or end"):
        GateSettings(acts="turn")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="penalty=0 must be above 0"):
        DuoSettings(penalty=0)


# ---------------------------------------------------------------------- head classes


def test_numbers_of_heads_follow_the_penalty_and_are_taken_by_the_method(tmp_path: Path) -> None:
    model, texts = llama(dtype=torch.float32), RepeatedSpans(96, [0, 1], 80, 120)
    settings = DuoSettings(steps=12, lr=0.3, recent=8, checkpoint_steps=5)
    kept = train_duo(model, texts, tmp_path / "kept.json", replace(settings, penalty=1e-6), show_progress=False)
    none = train_duo(model, texts, tmp_path / "none.json", replace(settings, penalty=1e4), show_progress=False)
    assert all(number == 0 for row in none.numbers for number in row)
    assert max(number for row in kept.numbers for number in row) > 0.8
    assert all(0 <= number <= 1 for row in kept.numbers for number in row)
    assert json.loads((tmp_path / "kept.json").read_text()) == kept.numbers
    out = tmp_path / "again.json"
    for stop in (3, None):
        train_duo(model, texts, out, replace(settings, penalty=1e-6), max_steps=stop, show_progress=False)
    assert out.read_bytes() == (tmp_path / "kept.json").read_bytes()
    assert METHODS.get("duo_attention")(heads=str(out)).heads.table == tuple(map(tuple, kept.numbers))  # type: ignore[attr-defined]


def test_spans_are_said_again() -> None:
    texts = RepeatedSpans(96, [0, 1], 80, 120)
    ids, begin = texts.draw("retain", 0, 3)
    assert torch.equal(texts.draw("retain", 0, 3).ids, ids)
    assert 80 <= begin <= 120
    assert SAID_AGAIN * SPAN_TOKENS[0] <= len(ids) - begin <= SAID_AGAIN * SPAN_TOKENS[1]
    assert int(ids.min()) >= 2
    first = ids[begin : begin + SPAN_TOKENS[0]]
    assert any(torch.equal(ids[i : i + len(first)], first) for i in range(begin - len(first) + 1))
    with pytest.raises(OptionError, match="need texts of at least 64"):
        RepeatedSpans(96, [], 20, 120)


# ---------------------------------------------------------------------- the commands


@pytest.mark.slow
def test_the_command_trains_a_gate_and_writes_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = training.defaults_of
    monkeypatch.setattr(training, "defaults_of", lambda model: replace(usual(model), check_texts=1))
    out = tmp_path / "gate.safetensors"
    said = right(
        "train",
        "gate",
        "--data",
        "recall",
        "--out",
        str(out),
        "--steps",
        "1",
        "--start",
        "bundled",
        "--target-keep",
        "20%",
        "--card",
    ).stdout
    assert "step 1 of 1" in said
    assert gates_of(out.read_bytes(), "it").facts["target"] == "0.2"
    card = out.with_suffix(".md").read_text()
    assert "The networks begin as retaining heads of the same model." in card
    assert "1 texts, one a step, seed 0" in card


def test_the_card_says_what_a_run_was(whole: tuple[Path, TrainedGates]) -> None:
    out, result = whole
    text = write_card(result, out, name="tiny", hardware="a machine")
    assert "| 0 | " in text
    assert "5 times the distance of the mean flag from 50%" in text
    assert "by the clock on a machine" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gate", "--out", "a.bin", "--data", "recall"], "name a file that ends in .safetensors"),
        (["gate", "--out", "a.safetensors", "--data", "recall", "--target-keep", "110%"], "between 0 and 1, such as"),
        (["gate", "--out", "a.safetensors", "--data", "recall", "--target-keep", "some"], "between 0 and 1, such as"),
        (["gate", "--out", "a.safetensors", "--data", "recall", "--teacher", "selv"], "did you mean 'self'"),
        (["gate", "--out", "a.safetensors", "--data", "recall", "--acts", "ende"], "did you mean 'end'"),
        (["gate", "--out", "a.safetensors", "--data", "recall", "--start", "no.safetensors"], "no.safetensors"),
        (["duo", "--out", "a.txt"], "name a file that ends in .json"),
        (["duo", "--out", "a.json", "--without", "passages"], "--without is of --data recall"),
    ],
)
def test_commands_that_make_no_sense(arguments: list[str], message: str) -> None:
    assert message in wrong("train", *arguments)
