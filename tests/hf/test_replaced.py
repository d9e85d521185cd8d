"""Whatever is replaced in a model after `compress` counts from the next pass on, and what comes back does too."""

from collections.abc import Callable

import peft
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import DynamicCache
from transformers.models.llama import modeling_llama

import millpond as mp
from millpond.hf.native_layers import decoder_layers
from millpond.hf.native_layers.decoder_layers import use_lean_layers
from millpond.kernels import native
from millpond.models.lean.watch import Watch
from tests.helpers.hf import families
from tests.helpers.hf.families import family, generate, one

pytestmark = [
    pytest.mark.skipif(not native.is_available(), reason="installed without native kernels"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # peft's
]


class Louder(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 1.5


class LouderLayer(modeling_llama.LlamaDecoderLayer):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs) * 1.5


class Scale(nn.Module):
    def forward(self, weight):
        return weight * 1.5


def mlp(model, layer=1):
    return model.model.layers[layer].mlp


def attn(model, layer=1):
    return model.model.layers[layer].self_attn


def lora(model, **options):
    torch.manual_seed(3)
    settings = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(**settings | options))


def lora_merged(model):
    wrapped = lora(model)
    wrapped.merge_adapter()
    return wrapped.unmerge_adapter


def lora_unloaded(model):
    lora(model).merge_and_unload()


def lora_disabled(model):
    with lora(model).disable_adapter():
        pass


def swap(owner, name, new):
    old = getattr(owner, name)
    setattr(owner, name, new)
    return lambda: setattr(owner, name, old)


def louder(layer):
    new = Louder(layer.in_features, layer.out_features, bias=False)
    new.weight = layer.weight
    return new


def into(weight):
    with torch.no_grad():
        weight.mul_(1.5)
    return lambda: weight.data.div_(1.5)


def data_swapped(weight):
    old = weight.data
    weight.data = old * 1.5
    return lambda: setattr(weight, "data", old)


def turned_over(weight):
    old = weight.data
    weight.data = old.t()  # as many numbers at the same place
    return lambda: setattr(weight, "data", old)


def bias_added(layer):
    layer.bias = nn.Parameter(torch.ones(layer.out_features))
    return lambda: setattr(layer, "bias", None)


def forward_of_its_own(module):
    module.forward = lambda x: x * 0.5
    return lambda: delattr(module, "forward")


def hooked(module):
    return module.register_forward_hook(lambda module, args, out: out * 1.5).remove


def hooked_everywhere(model):
    def hook(module, args, out):
        return out * 1.5 if isinstance(module, modeling_llama.LlamaMLP) else None

    return torch.nn.modules.module.register_module_forward_hook(hook).remove


def of_another_class(module, kind):
    module.__class__, old = kind, type(module)
    return lambda: setattr(module, "__class__", old)


def parametrized(layer):
    parametrize.register_parametrization(layer, "weight", Scale())


def another_layer(model):
    torch.manual_seed(5)
    return swap(model.model.layers, "1", modeling_llama.LlamaDecoderLayer(model.config, 1).eval())


def class_forward(model):
    return swap(modeling_llama.LlamaMLP, "forward", lambda self, x: x * 0.5)


def another_rotation(model):
    return swap(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin, **_: (q, k))


#: name -> change(model), which returns what takes it back, where it can be.
CHANGES: dict[str, Callable] = {
    "a lora adapter": lambda m: lora(m).unload,
    "a lora adapter with dora": lambda m: lora(m, use_dora=True).unload,
    "a lora adapter, merged": lora_merged,
    "a lora adapter, merged and unloaded": lora_unloaded,
    "a lora adapter, disabled and on again": lora_disabled,
    "a linear layer of another class": lambda m: swap(mlp(m), "up_proj", louder(mlp(m).up_proj)),
    "the class of a linear layer": lambda m: of_another_class(attn(m).v_proj, Louder),
    "a feed-forward": lambda m: swap(m.model.layers[1], "mlp", nn.Identity()),
    "a decoder layer": another_layer,
    "the class of a decoder layer": lambda m: of_another_class(m.model.layers[0], LouderLayer),
    "a norm": lambda m: swap(m.model.layers[1], "input_layernorm", modeling_llama.LlamaRMSNorm(32, 3.0)),
    "a norm's setting": lambda m: swap(m.model.layers[1].input_layernorm, "variance_epsilon", 3.0),
    "an activation": lambda m: swap(mlp(m), "act_fn", nn.ReLU()),
    "a parameter": lambda m: swap(mlp(m).up_proj, "weight", nn.Parameter(mlp(m).up_proj.weight * 1.5)),
    "a parameter's memory": lambda m: data_swapped(mlp(m).up_proj.weight),
    "a parameter's strides": lambda m: turned_over(attn(m).q_proj.weight),
    "a parameter's numbers": lambda m: into(mlp(m).up_proj.weight),
    "a bias": lambda m: bias_added(attn(m).q_proj),
    "a forward": lambda m: forward_of_its_own(mlp(m)),
    "the forward of a linear layer": lambda m: forward_of_its_own(attn(m).o_proj),
    "the forward of a class": class_forward,
    "a function of the module": another_rotation,
    "a hook": lambda m: hooked(mlp(m)),
    "a hook on all modules": hooked_everywhere,
    "a parametrization": lambda m: parametrized(mlp(m).up_proj),
    "the scale of attention": lambda m: swap(attn(m), "scaling", 0.1),
}
TEXT = one(16)["input_ids"]
#: When the change comes, and when it is taken back.
CHANGED, BACK = 10, 13


@torch.no_grad()
def decoded(model, cache, change):
    """The logits (16, vocabulary) of a prompt of six tokens and of each that follows, through a change and back."""
    logits, back = [model(TEXT[:, :6], cache=cache).logits[0]], None
    for column in range(6, TEXT.shape[1]):
        if column == CHANGED:
            back = change(model)
        if column == BACK and back is not None:
            back()
            back = None
        logits.append(model(TEXT[:, column : column + 1], cache=cache).logits[0])
    return torch.cat(logits)


@pytest.fixture
def native_passes(monkeypatch):
    """How many layers were passed natively, trials aside."""
    seen, real = [], decoder_layers._run
    monkeypatch.setattr(decoder_layers, "_run", lambda *args: (seen.append(args[3] is not None), real(*args))[1])
    return seen


@pytest.mark.covering
@pytest.mark.parametrize("which", ["ours", "a stock cache"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_counts_from_the_next_pass_on(name, which, native_passes):
    twin, model = family("llama").make(), family("llama").make()
    expected = decoded(twin, DynamicCache(config=twin.config), CHANGES[name])
    assert sum(native_passes) == 0
    with mp.compress(model, "full") as cache:
        cache = cache if which == "ours" else DynamicCache(config=model.config)
        found = decoded(model, cache, CHANGES[name])
    assert sum(native_passes) > 6  # one of two layers goes on natively, and both until then
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", [name for name in CHANGES if name != "a lora adapter, disabled and on again"])
def test_the_changes_change_something(name):
    model = family("llama").make()
    before = decoded(model, DynamicCache(config=model.config), lambda model: None)
    after = decoded(model, DynamicCache(config=model.config), CHANGES[name])
    assert torch.equal(before[:CHANGED], after[:CHANGED])
    assert (before - after)[CHANGED:BACK].abs().max() > 1e-2


@pytest.mark.parametrize("name", ["a lora adapter", "a linear layer of another class", "a forward", "an activation"])
def test_what_comes_back_passes_natively_again(name, native_passes):
    model = family("llama").make()
    with mp.compress(model, "full") as cache, torch.no_grad():
        model(TEXT[:, :6], cache=cache)
        back = CHANGES[name](model)
        model(TEXT[:, 6:7], cache=cache)
        back()
        native_passes.clear()
        model(TEXT[:, 7:8], cache=cache)
        assert sum(native_passes) == 2


IN_THE_ENGINE = [
    "a lora adapter",
    "a lora adapter, disabled and on again",
    "a linear layer of another class",
    "a feed-forward",
    "a norm",
    "an activation",
    "a bias",
    "the forward of a linear layer",
    "the forward of a class",
    "the scale of attention",
]


@pytest.mark.parametrize("name", IN_THE_ENGINE)
def test_the_engine_notices_too(name):
    model, twin = family("llama").make(), family("llama").make()
    prompt, settings = TEXT[0].tolist(), mp.SamplingParams(max_tokens=4, temperature=0)
    back = CHANGES[name](twin)
    expected = generate(twin, {"input_ids": TEXT}, 4)[0, 16:].tolist()
    if back is not None:
        back()
    with mp.LLM(model, method="full") as llm:
        llm.generate(prompt[:5], settings)
        back = CHANGES[name](model)
        found = llm.generate(prompt, settings)[0].completions[0].token_ids
        if back is not None:
            back()
    assert list(found) == expected


def test_another_dtype_counts(native_passes):
    model, twin = family("llama").make(), family("llama").make().bfloat16()
    with mp.compress(model, "full") as cache, torch.no_grad():
        model(TEXT[:, :6], cache=cache)
        cache.reset()
        model.bfloat16()
        stock = DynamicCache(config=twin.config)
        for ids in (TEXT, TEXT[:, :1]):
            native_passes.clear()
            found = model(ids, cache=cache).logits
            expected = twin(ids, cache=stock).logits
            assert found.dtype == torch.bfloat16
            torch.testing.assert_close(found, expected, atol=0.1, rtol=0)
        assert sum(native_passes) == 2


def test_a_peft_model_generates_with_its_adapter():
    wrapped = lora(family("llama").make())
    expected = wrapped.generate(input_ids=TEXT, max_new_tokens=6, do_sample=False, pad_token_id=0)
    model = family("llama").make()
    with mp.compress(model, "full") as cache:
        wrapped = lora(model)
        found = wrapped.generate(input_ids=TEXT, max_new_tokens=6, do_sample=False, pad_token_id=0, cache=cache)
        assert torch.equal(found, expected)
        with wrapped.disable_adapter():
            cache.reset()
            plain = generate(model, {"input_ids": TEXT}, 6, cache=cache)
    assert torch.equal(plain, generate(family("llama").make(), {"input_ids": TEXT}, 6))


def test_a_method_that_weighs_values_reads_the_projection_that_is_there():
    """CriticalKV looks at the output projection: a new one counts, and one whose weights cannot be read is refused."""
    tokens = []
    for when in ("before", "after"):
        model = family("llama").make()
        if when == "before":
            mlp_like = nn.Linear(32, 32, bias=False)
            mlp_like.weight = nn.Parameter(torch.randn(32, 32, generator=torch.Generator().manual_seed(1)))
            attn(model).o_proj = mlp_like
        with mp.compress(model, "criticalkv", 12, score="h2o") as cache:
            if when == "after":
                attn(model).o_proj = mlp_like
            generate(model, {"input_ids": families.text(1, 40)}, 2, cache=cache)
            tokens.append(cache.positions(1))
    assert tokens[0] == tokens[1]
    model = family("llama").make()
    with mp.compress(model, "criticalkv", 12, score="h2o") as cache:
        lora(model, target_modules=["o_proj"])
        with pytest.raises(mp.UnsupportedModelError, match="whose weights cannot be read"):
            generate(model, {"input_ids": families.text(1, 40)}, 2, cache=cache)


def test_a_switched_model_that_nobody_holds_is_collected():
    import gc
    import weakref

    model = family("llama").make()
    undo = use_lean_layers(model)
    layer = weakref.ref(model.model.layers[0])
    undo()
    del model
    gc.collect()
    assert layer() is None


def test_a_look_costs_little():
    """Thirty layers are looked at in well under the time of a step; the bound is loose, for busy machines."""
    import time

    model = family("llama").make(num_hidden_layers=30)
    watches = [Watch([m for m in layer.modules() if m is not layer], around=layer) for layer in model.model.layers]

    def once():
        begin = time.process_time()
        for _ in range(20):
            assert all(watch.unchanged() for watch in watches)
        return (time.process_time() - begin) / 20

    assert min(once() for _ in range(5)) < 2e-3
