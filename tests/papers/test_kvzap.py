"""KVzap: scores by hand, what stays against a reference worked from the paper, and hidden states on every path."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import millpond as mp
from millpond.errors import CacheMismatchError, OptionError, UnsupportedModelError
from millpond.hf.calibration.load import model_mark
from millpond.kernels.args import AttentionShape
from millpond.methods import METHODS
from millpond.policy.threshold_policy import ThresholdPolicy
from millpond.policy.trained.file import hidden_networks_of, save_heads
from millpond.policy.trained.gelu_score import GeluScore
from millpond.policy.trained.hidden_networks import HiddenNetwork, HiddenNetworks
from millpond.policy.trained.linear_score import LinearScore
from tests.helpers.hf.families import left_padded, shared_model
from tests.helpers.hf.normed import attention_inputs
from tests.helpers.matrix.models import llama
from tests.helpers.random_heads import NETWORKS_OF_PACKAGE, random_networks

kvzap = METHODS.get("kvzap")
PROMPT, NEW, WINDOW, TAU = 60, 24, 8, 0.3
pytestmark = pytest.mark.filterwarnings("ignore::millpond.hf.layer_budgets.FewEntriesWarning")


def text(n: int, seed: int = 0) -> Tensor:
    """No token twice: layer 0 would score it alike."""
    return 3 + torch.randperm(93, generator=torch.Generator().manual_seed(seed))[None, :n]


def written(networks: HiddenNetworks, folder: Path) -> str:
    file = folder / "networks.safetensors"
    save_heads(networks, file)
    return str(file)


def of_layers(*layers: HiddenNetwork) -> HiddenNetworks:
    return HiddenNetworks(layers, model_mark(llama()), "llama")


# ------------------------------------------------------------------ networks by hand


def test_linear_by_hand() -> None:
    network = LinearScore(torch.tensor([[1.0, 2.0], [0.0, -1.0]]), torch.tensor([0.5, 0.0]))
    assert network.raw(torch.tensor([[3.0, 1.0]])).tolist() == [[5.5, -1.0]]


def test_gelu_by_hand() -> None:
    """GELU(1) = 0.8413, the exact one (its tanh form gives 0.8412), GELU(-1) = -0.1587."""
    network = GeluScore(torch.eye(2), torch.zeros(2), torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([0.0, 1.0]))
    cdf = (1 + math.erf(1 / math.sqrt(2))) / 2
    expected = [cdf, cdf - (1 - cdf) + 1]
    assert network.raw(torch.tensor([[1.0, -1.0]]))[0].tolist() == pytest.approx(expected, abs=1e-6)


def plain(network: HiddenNetwork, hidden: Tensor) -> Tensor:
    """(KV heads, n): the formula of the paper in float64, of stored numbers."""
    parts = [getattr(network, part).double() for part in network.PARTS]
    x = hidden.double()
    if len(parts) == 2:
        return (x @ parts[0].T + parts[1]).T
    return (F.gelu(x @ parts[0].T + parts[1]) @ parts[2].T + parts[3]).T


# ------------------------------------------------------------------ what stays


def judged(scores: Tensor, prompt: int, seen: int, window: int, tau: float) -> list[list[int]]:
    """The paper's rule token by token: an entry is judged once, when it has left the newest `window`."""
    kept = [list(range(prompt)) for _ in scores]
    for now in range(prompt, seen + 1):
        for head, positions in enumerate(kept):
            if now > prompt:
                positions.append(now - 1)
            positions[:] = [p for p in positions if p >= now - window or float(scores[head, p]) >= tau]
    return kept


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_kept_positions_are_those_of_the_rule(kind: str, tmp_path: Path) -> None:
    """A text in full, by a model that sees all of it: layer 0's hidden states do not depend on what was evicted."""
    model, ids = llama("gqa", torch.float32), text(PROMPT + NEW)
    networks = random_networks(model, kind)
    file = written(networks, tmp_path)
    hidden = attention_inputs(model, ids)
    networks = hidden_networks_of(Path(file).read_bytes(), "here")
    with torch.no_grad(), mp.compress(model, "kvzap", networks=file, threshold=TAU, window=WINDOW) as cache:
        model(ids[:, :PROMPT], cache=cache)
        at_prompt_end = [cache.positions(layer) for layer in (0, 1)]
        for token in ids[:, PROMPT:].split(1, 1):
            model(token, cache=cache)
        decoded = cache.positions(0)
    for layer in (0, 1):  # a prompt is read in full
        scores = plain(networks.layers[layer], hidden[layer][:PROMPT])
        assert at_prompt_end[layer] == judged(scores, PROMPT, PROMPT, WINDOW, TAU)
    assert decoded == judged(plain(networks.layers[0], hidden[0]), PROMPT, PROMPT + NEW, WINDOW, TAU)
    assert len({len(head) for layer in at_prompt_end for head in layer}) > 1, "the text decides how much stays"


def test_every_waits_and_a_budget_is_the_most(tmp_path: Path) -> None:
    model, ids = llama("gqa", torch.float32), text(PROMPT + NEW)
    file = written(random_networks(model, "linear"), tmp_path)
    options: dict[str, Any] = {"networks": file, "threshold": TAU, "window": WINDOW}

    def kept(budget: int | None, **more: Any) -> list[list[int]]:
        with torch.no_grad(), mp.compress(model, "kvzap", budget, **options, **more) as cache:
            model(ids[:, :PROMPT], cache=cache)
            for token in ids[:, PROMPT:].split(1, 1):
                model(token, cache=cache)
            return cache.positions(0)

    exact, late, grown = kept(None), kept(None, every=6), kept(None, decode="grow")
    newest = PROMPT + NEW - WINDOW - 6
    assert [[p for p in head if p < newest] for head in late] == [[p for p in head if p < newest] for head in exact]
    assert all(set(one) <= set(other) for one, other in zip(exact, late, strict=True))
    assert all(set(range(PROMPT, PROMPT + NEW)) <= set(head) for head in grown)
    bounded = kept(16)
    assert sum(map(len, bounded)) <= 2 * 16 < sum(map(len, exact))


@pytest.mark.parametrize("compete", ["no", "layer", "model"])
def test_with_a_budget_the_highest_scores_stay(compete: str, tmp_path: Path) -> None:
    model, ids, budget = llama("gqa", torch.float32), text(PROMPT), 20
    file = written(random_networks(model, "mlp"), tmp_path)
    networks = hidden_networks_of(Path(file).read_bytes(), "here")
    hidden = attention_inputs(model, ids)
    with (
        torch.no_grad(),
        mp.compress(model, "kvzap", budget, networks=file, window=4, decode="grow", compete=compete) as cache,
    ):
        model(ids, cache=cache)
        kept = [cache.positions(layer) for layer in (0, 1)]
    scores = torch.stack([plain(networks.layers[layer], hidden[layer]) for layer in (0, 1)])
    scores[:, :, -4:] = torch.inf
    rows = {"no": scores.view(4, 1, -1), "layer": scores.view(2, 1, -1), "model": scores.view(1, 1, -1)}[compete]
    expected = torch.zeros_like(rows, dtype=torch.bool)
    expected.scatter_(-1, rows.topk(budget * 4 // len(rows), -1).indices, True)
    by_head = expected.view(2, 2, -1)
    found = [[torch.nonzero(by_head[layer, head]).flatten().tolist() for head in (0, 1)] for layer in (0, 1)]
    if compete != "model":
        assert kept == found
    else:  # each layer has a whole number of entries per head, so an entry of each may be another layer's
        both = zip([*kept[0], *kept[1]], [*found[0], *found[1]], strict=True)
        assert sum(len(set(ours) ^ set(theirs)) for ours, theirs in both) <= 2


# ------------------------------------------------------------------ hidden states on every path


@pytest.mark.parametrize("runner", ["auto", "modules"])
@pytest.mark.parametrize("options", [{"threshold": TAU, "window": WINDOW}, {"window": 4}])
def test_the_engine_answers_as_generate_does(runner: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = llama("gqa", torch.float32)
    options = {**options, "networks": written(random_networks(model, "mlp"), tmp_path)}
    budget = None if "threshold" in options else 16
    asked = [text(n, n)[0].tolist() for n in (40, 57, 23)]
    params = mp.SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    engine = mp.LLM(model, method="kvzap", budget=budget, options=options, runner=runner, max_step_tokens=24)
    answers = [list(answer.outputs[0].token_ids) for answer in engine.generate(asked, params)]
    for ids, answer in zip(asked, answers, strict=True):
        with torch.no_grad(), mp.compress(model, "kvzap", budget, **options) as cache:
            out = model.generate(
                torch.tensor([ids]), past_key_values=cache, max_new_tokens=12, min_new_tokens=12, do_sample=False
            )
        assert out[0, len(ids) :].tolist() == answer


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt", "gpt_neox", "gemma2", "phi"])
def test_a_batch_with_pads_holds_what_each_text_holds_alone(family: str) -> None:
    model, padded = shared_model(family), left_padded([31, 24])
    ids, mask = padded["input_ids"], padded["attention_mask"]
    with torch.no_grad(), mp.compress(model, "kvzap", threshold=0.0, window=4) as cache:
        model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), cache=cache)
        together = [[cache.positions(layer, row) for layer in (0, 1)] for row in range(len(ids))]
    for row, kept in enumerate(together):
        with torch.no_grad(), mp.compress(model, "kvzap", threshold=0.0, window=4) as cache:
            model(ids[row : row + 1, -int(mask[row].sum()) :], cache=cache)
            assert kept == [cache.positions(layer) for layer in (0, 1)]


def test_a_draft_that_is_taken_back_leaves_nothing() -> None:
    model, ids = llama("gqa", torch.float32), text(PROMPT + 8)

    def decoded(drafts: bool) -> list[list[int]]:
        with torch.no_grad(), mp.compress(model, "kvzap", threshold=TAU, window=4) as cache:
            model(ids[:, :PROMPT], cache=cache)
            if drafts:
                cache.activate_past_recording()
                model(torch.cat([ids[:, PROMPT : PROMPT + 3], text(3, 9)], 1), cache=cache)
                cache.crop(-3)
            for token in ids[:, PROMPT + 3 * drafts :].split(1, 1):
                model(token, cache=cache)
            return cache.positions(0)

    assert decoded(True) == decoded(False)


def test_a_pass_without_hidden_states_is_refused_by_name() -> None:
    model = llama("gqa", torch.float32)
    with mp.compress(model, "kvzap", threshold=TAU, window=4) as cache:
        layer = next(iter(cache.entry_layers.values()))
        q, k, v = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8)
        with pytest.raises(UnsupportedModelError, match="hidden states that attention reads"):
            layer.attend(q, k, v, None, AttentionShape(1.0))


# ------------------------------------------------------------------ options


def test_options() -> None:
    assert isinstance(kvzap(threshold=-4.0), ThresholdPolicy)
    assert kvzap(threshold=-4.0).protect.recent == 128
    assert kvzap().protect.recent == 0.1
    for options, told in (
        ({"threshold": "low"}, "must be a number, or none"),
        ({"threshold": -4.0, "window": 0.5}, "name a count"),
        ({"threshold": -4.0, "compete": "layer"}, "leave one of the two out"),
        ({"every": 4}, "belongs to a threshold"),
        ({"window": "all"}, "or auto"),
        ({"compete": "model", "decode": "evict"}, "layers cannot compete"),
    ):
        with pytest.raises(OptionError, match=told):
            kvzap(**options)


def test_networks_of_another_model_and_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(random_networks(llama("gqa", torch.float32), "linear"), tmp_path)
    with pytest.raises(CacheMismatchError, match="another model"):
        mp.compress(shared_model("qwen3"), "kvzap", 16, networks=file)
    with pytest.raises(OptionError, match="of the kind 'kvzap-linear', and this method takes 'fastkvzip'"):
        mp.compress(llama("gqa", torch.float32), "fastkvzip", 16, networks=file)
    monkeypatch.setattr("millpond.hf.retaining_heads.networks_of_package", NETWORKS_OF_PACKAGE)
    with pytest.raises(OptionError, match="'millpond train kvzap'"):
        mp.compress(llama(), "kvzap", 16)
