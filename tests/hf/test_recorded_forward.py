"""Steps of `generate` that are recorded whole: who gets one, who does not, and that it changes nothing."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import PreTrainedModel

import millpond as mp
from millpond.cache.layer.decode_step import NanCheck
from millpond.hf.cache import MillpondCache
from millpond.hf.native_layers import recorded_forward
from tests.helpers.hf.families import NAMES, family, generate, left_padded, one, shared_model, teacher_forced, text

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

#: Families that `describe` takes apart.
TAKEN = {"llama", "mistral", "qwen2", "qwen3", "opt", "gpt_neox"}
SWITCH = recorded_forward.recorder_of


def rehearsed(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """As a GPU records: the work is run once before."""
    work()
    return work


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are recorded on a CPU too, as work that is done again."""
    monkeypatch.setattr(recorded_forward, "recorder_of", lambda device: rehearsed)


def by_layer(model: PreTrainedModel, *args: Any, **options: Any) -> MillpondCache:
    """A cache whose model runs its own forward."""
    return mp.compress(model, *args, native_layers=False, **options)


def counts(cache: MillpondCache) -> tuple[int, int]:
    """Steps of a cache that were recorded and replayed."""
    steps = recorded_forward._open.get(cache)
    graph = None if steps is None else steps.graph
    return (0, 0) if graph is None else (graph.recorded, graph.replayed)


def kept(cache: MillpondCache) -> Any:
    positions = [cache.positions(n, row) for n in cache.entry_layers for row in range(cache.tracker.n_seq)]
    return positions, cache.stats()


def agree(model: PreTrainedModel, run: Callable[[MillpondCache], Tensor], *args: Any, **options: Any) -> int:
    """Compare what a run gives and leaves with both forwards; return the steps that were replayed."""
    with by_layer(model, *args, **options) as cache:
        expected, left = run(cache), kept(cache)
    with mp.compress(model, *args, **options) as cache:
        found = run(cache)
        assert (
            torch.equal(found, expected) if found.dtype is torch.int64 else torch.allclose(found, expected, atol=1e-4)
        )
        assert kept(cache) == left
        cache.check_integrity()
        return counts(cache)[1]


@pytest.mark.parametrize("lengths", [[40], [40, 23, 31]], ids=["one", "padded"])
@pytest.mark.parametrize(
    ("method", "codec", "replays"),
    [
        ("full", "auto", True),
        ("h2o", "auto", True),
        ("snapkv", "auto", True),
        ("ada", "auto", True),
        ("tova", "auto", True),
        ("streaming", "auto", False),  # keys turn
        ("full", "int4", True),
        ("full", "rotated4", True),
        ("h2o", "int4", True),
        ("h2o", "bf16:20%,int8:20%,int4", False),  # entries grow old
    ],
)
def test_generate(method: str, codec: str, replays: bool, lengths: list[int]) -> None:
    model, prompt = family("llama").make(head_dim=32), left_padded(lengths)
    budget = None if method == "full" else "50%"
    n = agree(model, lambda cache: generate(model, prompt, 50, cache=cache), method, budget, codec)
    assert (n > 40) == replays


@pytest.mark.parametrize("name", NAMES)
def test_families(name: str) -> None:
    model, prompt = shared_model(name), left_padded([40, 23])
    n = agree(model, lambda cache: generate(model, prompt, 12, cache=cache), "h2o", "50%")
    assert n == (10 if name in TAKEN else 0)  # the second of eleven is recorded


def test_bfloat16() -> None:
    model, ids = family("llama").make().bfloat16(), text(2, 30)
    with mp.compress(model, "h2o", "50%") as cache, torch.no_grad():
        model(ids[:, :20], cache=cache)
        logits = [model(ids[:, i : i + 1], cache=cache).logits for i in range(20, 30)]
        assert counts(cache)[1] == 9
    assert all(one.dtype is torch.bfloat16 and one.shape == (2, 1, 96) for one in logits)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 0.8, "top_p": 0.9},
        {"num_beams": 3},
        {"do_sample": True, "num_return_sequences": 2},
        {"repetition_penalty": 1.3},
        {"eos_token_id": list(range(3, 12)), "do_sample": True},  # rows end one after another
    ],
    ids=["sampled", "beams", "several", "penalty", "ends"],
)
def test_ways_to_generate(options: dict[str, Any]) -> None:
    model, prompt = shared_model("llama"), left_padded([40, 23, 31])

    def run(cache: MillpondCache) -> Tensor:
        torch.manual_seed(3)
        return generate(model, prompt, 20, cache=cache, **options)

    assert agree(model, run, "h2o", "50%") > 5


@pytest.mark.parametrize("positions", [True, False])
def test_a_loop_of_the_callers_own(positions: bool) -> None:
    """Masks are looked at outside `generate`; without positions, pads count in those of the model."""
    model, new = shared_model("llama"), text(2, 10, seed=9)

    def run(cache: MillpondCache, prompt: dict[str, Tensor]) -> Tensor:
        if positions:
            return teacher_forced(model, prompt, new, cache)
        mask, ids, logits = prompt["attention_mask"], prompt["input_ids"], []
        for column in range(10):
            logits.append(model(ids, attention_mask=mask, cache=cache).logits[:, -1])
            mask, ids = torch.cat([mask, mask.new_ones(2, 1)], 1), new[:, column : column + 1]
        return torch.stack(logits, 1)

    padded, even = left_padded([30, 21]), left_padded([30, 30])
    with torch.no_grad():
        assert agree(model, lambda cache: run(cache, even), "h2o", "50%") > 7
        n = agree(model, lambda cache: run(cache, padded), "h2o", "50%")
    assert (n > 7) == positions


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_positions_are_those_that_are_passed(name: str) -> None:
    model, ids = shared_model(name), text(2, 30)
    places = torch.arange(30)[None] * 2

    def run(cache: MillpondCache) -> Tensor:
        logits = [model(ids[:, :20], position_ids=places[:, :20], cache=cache).logits[:, -1]]
        for n in range(20, 30):
            logits.append(model(ids[:, n : n + 1], position_ids=places[:, n : n + 1], cache=cache).logits[:, -1])
        return torch.stack(logits, 1)

    with torch.no_grad():
        assert agree(model, run, "h2o", "50%") == 9


def test_pads_behind_the_prompt_take_the_models_own_forward() -> None:
    model, new = shared_model("llama"), text(2, 12, seed=9)

    def run(cache: MillpondCache) -> Tensor:
        prompt = left_padded([30, 21])
        mask, ids, logits = prompt["attention_mask"], prompt["input_ids"], []
        for column in range(12):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            logits.append(model(ids, attention_mask=mask, position_ids=positions, cache=cache).logits[:1, -1])
            real = torch.tensor([[1], [column % 3 > 0]])
            mask, ids = torch.cat([mask, real], 1), new[:, column : column + 1]
        return torch.stack(logits, 1)

    with torch.no_grad():
        assert 0 < agree(model, run, "full") < 9


def test_a_mask_that_hides_what_was_read_is_refused() -> None:
    model, ids = shared_model("llama"), text(1, 30)
    with mp.compress(model, "full") as cache, torch.no_grad():
        model(ids[:, :28], cache=cache)
        model(ids[:, 28:29], attention_mask=torch.ones(1, 29), cache=cache)
        hidden = torch.ones(1, 30)
        hidden[0, 3] = 0
        with pytest.raises(mp.CacheMismatchError, match="shows 29 tokens"):
            model(ids[:, 29:], attention_mask=hidden, cache=cache)


def test_whoever_looks_inside_sees_every_pass() -> None:
    model, ids = family("llama").make(), text(1, 40)
    seen: list[Any] = []

    def step(cache: MillpondCache, column: int, **options: Any) -> Any:
        return model(ids[:, column : column + 1], cache=cache, **options)

    with mp.compress(model, "h2o", "50%") as cache, torch.no_grad():
        hook = model.model.layers[0].mlp.register_forward_hook(lambda *args: seen.append(args))
        model(ids[:, :20], cache=cache)
        step(cache, 20)
        assert len(seen) == 2
        hook.remove()
        step(cache, 21), step(cache, 22)
        assert counts(cache) == (1, 1)
        for module in (model.model, model.lm_head, model.model.norm):
            hook = module.register_forward_pre_hook(lambda *args: seen.append(args))
            step(cache, cache.tracker.columns)
            hook.remove()
        assert len(seen) == 5
        hook = model.register_forward_hook(lambda *args: seen.append(args))  # around all, so it runs anyway
        step(cache, 26)
        hook.remove()
        assert (len(seen), counts(cache)) == (6, (1, 2))
        embedded = model.get_input_embeddings()(ids[:, 27:28])
        model(inputs_embeds=embedded, cache=cache)
        step(cache, 28, logits_to_keep=torch.tensor([0]))
        assert isinstance(step(cache, 29, return_dict=False), tuple)
        model.train()
        step(cache, 30)
        model.eval()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            step(cache, 31)
        assert counts(cache) == (1, 2)
        cache.watch(lambda *args: seen.append(args))
        step(cache, 32)
        assert (len(seen), counts(cache)) == (8, (1, 2))  # by two layers
        cache.watch(None)
        step(cache, 33, logits_to_keep=1), step(cache, 34, use_cache=True, output_attentions=False)
        assert counts(cache) == (1, 4)
        with torch.enable_grad():
            step(cache, 35)
        with torch.inference_mode():
            step(cache, 36)
        assert counts(cache) == (1, 5)
        assert len(step(cache, 37, output_hidden_states=True).hidden_states) == 3
        assert counts(cache) == (1, 5)


def test_weights_that_are_replaced_count() -> None:
    model, ids = family("llama").make(), text(1, 40)
    head, layer = deepcopy(model.lm_head), deepcopy(model.model.layers[0])
    layer.self_attn.config = model.config
    with torch.no_grad():
        for weight in (*head.parameters(), *layer.parameters()):
            weight.mul_(1.1)

    def run(cache: MillpondCache) -> Tensor:
        logits = [model(ids[:, :20], cache=cache).logits[:, -1]]
        for column in range(20, 40):
            if column == 26:  # as an optimizer writes
                model.model.layers[1].mlp.up_proj.weight.mul_(1.1)
            if column == 30:
                model.lm_head = head
            if column == 35:
                model.model.layers[0] = layer
            logits.append(model(ids[:, column : column + 1], cache=cache).logits[:, -1])
        return torch.stack(logits)

    state = {name: weight.clone() for name, weight in model.state_dict().items()}
    own = model.lm_head, model.model.layers[0]
    with torch.no_grad():
        with by_layer(model, "h2o", "50%") as cache:
            expected = run(cache)
        model.lm_head, model.model.layers[0] = own
        model.load_state_dict(state)
        with mp.compress(model, "h2o", "50%") as cache:
            torch.testing.assert_close(run(cache), expected)
            assert counts(cache) == (1, 4)  # those behind the last change


@pytest.mark.parametrize("change", ["forward of the head", "layer", "class", "wide logits"])
def test_other_models_run_their_own_forward(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = family("llama").make(), left_padded([40, 23])
    if change == "forward of the head":
        own = model.lm_head.forward
        model.lm_head.forward = lambda x: own(x).tanh()
    elif change == "layer":  # built as Llama's, and computes something else
        kind = type(model.model.layers[1].mlp)
        model.model.layers[1].mlp.__class__ = type(
            "Half", (kind,), {"forward": lambda self, x: kind.forward(self, x) / 2}
        )
    else:
        own_class = type(model).forward

        model = model.bfloat16() if change == "wide logits" else model

        def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
            out = own_class(self, *args, **kwargs)
            out.logits = -out.logits if change == "class" else out.logits.float()
            return out

        monkeypatch.setattr(type(model), "forward", changed)
    assert agree(model, lambda cache: generate(model, prompt, 12, cache=cache), "h2o", "50%") == 0


def test_a_class_that_gets_another_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = family("llama").make(), text(1, 30)
    own = type(model).forward
    with mp.compress(model, "full") as cache, torch.no_grad():
        model(ids[:, :20], cache=cache)
        for column in range(20, 24):
            model(ids[:, column : column + 1], cache=cache)
        assert counts(cache) == (1, 3)
        monkeypatch.setattr(type(model), "forward", lambda *args, **kwargs: "another")
        with pytest.raises(mp.UnsupportedModelError, match="was given no keys"):
            type(model).__call__(model, ids[:, 24:25], cache=cache)
        monkeypatch.setattr(type(model), "forward", own)


def test_a_token_behind_drafts_keeps_them() -> None:
    model, ids = shared_model("llama"), text(1, 40)
    with mp.compress(model, "h2o", "50%") as cache, torch.no_grad():
        model(ids[:, :20], cache=cache)
        cache.activate_past_recording()
        model(ids[:, 20:25], cache=cache)
        for column in range(25, 28):
            model(ids[:, column : column + 1], cache=cache)
        with pytest.raises(mp.CacheMismatchError, match="cannot take back 1"):
            cache.crop(-1)
        assert counts(cache) == (0, 0)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("sirllm", {}),  # reads the model's predictions
        ("fastgen", {"special": "1", "punctuation": "5;6;7"}),  # and token ids
        ("kvzip", {"ask": "none"}),  # repeats the prompt
        ("snapkv", {"between_chunks": False}),
        ("h2o", {"memory_limit": "64MiB"}),
    ],
)
def test_methods_with_hooks_or_late_plans(method: str, options: dict[str, Any]) -> None:
    model, prompt = shared_model("llama"), left_padded([40, 23])
    n = agree(model, lambda cache: generate(model, prompt, 16, cache=cache), method, "50%", **options)
    assert bool(n) == (method != "sirllm")


def test_spans_forks_drafts_and_later_turns() -> None:
    model, prompt = shared_model("llama"), one(40)

    def turn(first: Tensor) -> dict[str, Tensor]:
        return {"input_ids": torch.cat([first, text(1, 8, seed=2)], 1)}

    def run(cache: MillpondCache) -> Tensor:
        cache.protect([(3, 7)])
        first = generate(model, prompt, 12, cache=cache)
        with cache.fork() as other:
            aside = generate(model, turn(first), 12, cache=other)
        return torch.cat([aside, generate(model, turn(first), 12, cache=cache, prompt_lookup_num_tokens=3)])

    agree(model, run, "h2o", "50%")


def test_the_forward_comes_back() -> None:
    model, prompt = family("llama").make(), one(20)
    signature = inspect.signature(model.forward)
    first, second = mp.compress(model, "full"), mp.compress(model, "h2o", "50%")
    assert "forward" in vars(model)
    assert inspect.signature(model.forward) == signature
    generate(model, prompt, 6, cache=first)
    first.close()
    generate(model, prompt, 6, cache=second)
    assert counts(second) == (1, 4)
    with pytest.raises(mp.CacheMismatchError, match="closed"):
        generate(model, prompt, 6, cache=first)
    second.close()
    assert "forward" not in vars(model)
    own = model.forward = lambda *args, **kwargs: type(model).forward(model, *args, **kwargs)
    with mp.compress(model, "full") as cache:
        generate(model, prompt, 6, cache=cache)
        assert model.forward is own
        assert counts(cache) == (0, 0)
    with by_layer(family("llama").make(), "full") as cache:
        assert "forward" not in vars(cache.model())
        generate(cache.model(), prompt, 2, cache=cache)


def test_steps_do_not_keep_a_model() -> None:
    model = family("llama").make()
    cache = mp.compress(model, "full")
    generate(model, one(20), 6, cache=cache)
    weight = weakref.ref(model.lm_head.weight)
    del model
    gc.collect()
    gc.collect()  # what was freed with it: work that is recorded here knows its own graph
    assert weight() is None
    cache.close()


def test_only_a_gpu_records(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SWITCH(torch.device("cpu")) is None
    assert SWITCH(torch.device("cuda")) is recorded_forward.record_cuda
    monkeypatch.setenv("MILLPOND_CUDA_GRAPHS", "0")
    assert SWITCH(torch.device("cuda")) is None


def test_frequencies_that_change_with_the_text_are_the_models_own() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = family("llama").make(rope_parameters=rope)
    with mp.compress(model, "full") as cache:
        generate(model, one(20), 6, cache=cache)
        assert counts(cache) == (0, 0)


class Launches(TorchDispatchMode):
    """Counts ops that launch something, and waits for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(out.alias_info is not None and not out.alias_info.is_write for out in func._schema.returns):
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def uncounted(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """A record whose replay launches nothing that counts."""

    def replay() -> None:
        with _disable_current_modes():
            work()

    return replay


def launched(layers: int, monkeypatch: pytest.MonkeyPatch, masked: bool) -> Counter[str]:
    """Ops of one step around its replay, of a model with as many layers."""
    monkeypatch.setattr(recorded_forward, "recorder_of", lambda device: uncounted)
    monkeypatch.setattr(NanCheck, "check", lambda *args: None)  # a GPU looks once for all layers, each 64 columns
    model, ids = family("llama").make(num_hidden_layers=layers), text(2, 30)
    mode = Launches()
    with mp.compress(model, "h2o", "50%") as cache, torch.no_grad():
        model(ids[:, :20], cache=cache)
        cache.passes.answer_begin = 20 if masked else None  # as `generate` sets it
        for column in range(20, 25):
            mask = torch.ones(2, column + 1, dtype=torch.int64) if masked else None
            with mode if column == 24 else nullcontext():
                model(ids[:, column : column + 1], attention_mask=mask, cache=cache)
        assert counts(cache) == (1, 4)
    return mode.counts


@pytest.mark.parametrize("masked", [True, False])
def test_a_step_launches_as_much_whatever_the_layers_and_waits_for_nothing(
    masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = launched(2, monkeypatch, masked), launched(4, monkeypatch, masked)
    assert few == many
    assert few.total() <= 12, few
    assert not few.keys() & {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "item"}


def test_inside_generate_no_mask_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = shared_model("llama"), left_padded([40, 23])
    seen: list[Any] = []
    real = mp.hf.cache.PositionTracker._open

    def opened(self: Any, start: int, length: int, mask: Tensor | None, device: torch.device) -> Any:
        seen.append(mask)
        return real(self, start, length, mask, device)

    monkeypatch.setattr(mp.hf.cache.PositionTracker, "_open", opened)
    with mp.compress(model, "h2o", "50%") as cache:
        out = generate(model, prompt, 10, cache=cache)
        assert [mask is None for mask in seen] == [False, *[True] * 9]
        seen.clear()
        mask = torch.cat([prompt["attention_mask"], torch.ones(2, 10, dtype=torch.int64)], 1)
        generate(model, {"input_ids": out, "attention_mask": mask}, 10, cache=cache)  # its prompt is one new token
        assert [mask is None for mask in seen] == [False, *[True] * 9]
        assert cache.passes.answer_begin is None
