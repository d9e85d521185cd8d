"""A decoder without its modules: the same logits, from the same weights, held once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.hf.families import NAMES, family, generate, one, text
from torch import Tensor

import millpond as mp
from millpond.errors import OptionError, UnsupportedModelError
from millpond.kernels.decoder_ops import DecoderOps, choose
from millpond.models.lean import fuse
from millpond.models.lean.describe import describe
from millpond.models.lean.fuse import together
from millpond.models.load import load_model
from millpond.runner.packed_model import PackedModel

LEAN = ["llama", "mistral", "qwen2", "qwen3", "opt", "gpt_neox"]
#: Families, and settings of theirs that change what a layer is made of.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in LEAN},
    "llama, one head each": ("llama", {"num_key_value_heads": 4}),
    "llama, biases": ("llama", {"attention_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, gelu": ("llama", {"hidden_act": "gelu"}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}),
    "opt, norms behind": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 24}),
    "opt, no biases": ("opt", {"enable_bias": False}),
    "gpt_neox, one after the other": ("gpt_neox", {"use_parallel_residual": False}),
    "gpt_neox, whole heads turn": (
        "gpt_neox",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}},
    ),
}


def model_of(kind: str) -> Any:
    name, options = KINDS[kind]
    return family(name).make(**options)


def causal(index: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention over the rows themselves, in float32."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (t.float().transpose(0, 1) for t in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
    later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    weights = (q @ k.mT * scale).masked_fill(later, -torch.inf).softmax(-1)
    return (weights @ v).transpose(0, 1).flatten(1)


def lean_logits(model: Any, ids: Tensor, rows: Tensor) -> Tensor:
    decoder = describe(model).decoder
    scale = 1.0 if model.config.model_type == "opt" else decoder.blocks[0].head_dim ** -0.5
    dtype = model.dtype
    attend = lambda index, q, k, v: causal(index, q, k, v, scale).to(dtype)  # noqa: E731
    with torch.no_grad():
        return decoder.forward(ids, torch.arange(len(ids)), attend, rows)


@pytest.mark.covering
@pytest.mark.parametrize("length", [1, 9, 40])
@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_logits_are_those_of_the_modules(kind: str, length: int, dtype: torch.dtype, most: float) -> None:
    model = model_of(kind).to(dtype)
    model.config.sliding_window = None  # what the attention does is not the decoder's
    ids = text(1, length)
    with torch.no_grad():
        expected = model(ids).logits[0]
    rows = torch.arange(0, length, 3)
    found = lean_logits(model, ids[0], rows)
    assert found.shape == (len(rows), model.config.vocab_size)
    assert (found - expected[rows]).abs().max() <= most * expected.abs().max()


@pytest.mark.parametrize("name", LEAN)
def test_torch_and_native_kernels_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = family(name).make(), text(1, 9)[0]
    rows = torch.arange(9)
    usual = lean_logits(model, ids, rows)
    monkeypatch.setenv("MILLPOND_KERNELS", "reference")
    assert type(choose(torch.ones(1, 4))) is DecoderOps
    torch.testing.assert_close(lean_logits(model, ids, rows), usual)


@pytest.mark.parametrize("name", LEAN)
def test_weights_are_held_once_and_stay_what_they_were(name: str) -> None:
    model, twin = family(name).make(), family(name).make()
    decoder = describe(model).decoder
    for (key, weight), before in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(weight, before), key
    for block in decoder.blocks:
        for projection in (block.qkv, block.up, block.out, block.down):
            assert projection.whole is not None
            spot = projection.whole[0].untyped_storage().data_ptr()
            assert all(weight.untyped_storage().data_ptr() == spot for weight, _ in projection.parts)
    stored = {w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in model.parameters()}
    assert sum(stored.values()) == sum(w.nbytes for w in twin.parameters())


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_the_file_that_a_model_came_from_is_let_go(tmp_path: Path) -> None:
    family("qwen2").make(tie_word_embeddings=True).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    with torch.no_grad():
        before = model(**one(5)).logits
    described = describe(model)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text(encoding="utf-8")
    torch.testing.assert_close(model(**one(5)).logits, before)
    describe(model)
    assert described.watch.unchanged()  # nothing moves again


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_embeddings_of_which_rows_are_read_stay_in_the_file(tmp_path: Path) -> None:
    family("qwen2").make(tie_word_embeddings=False).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    with torch.no_grad():
        before = model(**one(5)).logits
    tokens, head = model.model.embed_tokens.weight, model.lm_head.weight
    places = tokens.data_ptr(), head.data_ptr()
    describe(model)
    assert tokens.data_ptr() == places[0]
    assert head.data_ptr() != places[1]
    torch.testing.assert_close(model(**one(5)).logits, before)


def test_matrices_of_a_layer_lie_in_one_memory_and_the_rest_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and biases are kept where matrices become codes, and must not keep their memory."""
    monkeypatch.setattr(fuse, "MIN_IN_ONE", 1)
    model, twin = family("qwen2").make(), family("qwen2").make()
    decoder = describe(model).decoder
    spots = []
    for block in decoder.blocks:
        parts = [part for taken in (block.qkv, block.out, block.up, block.down) for part in taken.parts]
        matrices = {weight.untyped_storage().data_ptr() for weight, _ in parts}
        biases = {bias.untyped_storage().data_ptr() for _, bias in block.qkv.parts}
        norms = {p.norm.weight.untyped_storage().data_ptr() for p in (block.qkv, block.up)}
        assert len(matrices) == 1
        assert not matrices & (biases | norms)
        spots += matrices
    assert len(set(spots)) == len(decoder.blocks)
    for (key, weight), before in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(weight, before), key
    torch.testing.assert_close(model(**one(9)).logits, twin(**one(9)).logits)


def test_fusing_again_moves_nothing(tmp_path: Path) -> None:
    model = family("qwen2").make()
    attn = model.model.layers[0].self_attn
    first = together([attn.q_proj, attn.k_proj, attn.v_proj]).whole
    again = together([attn.q_proj, attn.k_proj, attn.v_proj]).whole
    assert first is not None
    assert again is not None
    for one_, other in zip(first, again, strict=True):
        assert one_ is not None
        assert other is not None
        assert (one_.data_ptr(), one_.shape) == (other.data_ptr(), other.shape)
    with torch.no_grad():
        attn.k_proj.weight.fill_(7)
    assert (first[0] == 7).sum() == attn.k_proj.weight.numel()
    before = model(**one(5)).logits
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(**one(5)).logits, before)


@pytest.mark.parametrize("name", NAMES)
def test_chosen_where_it_can_run(name: str) -> None:
    if family(name).latents:
        pytest.skip("the engine runs no latents")
    model = family(name).make()
    packed = PackedModel(model)
    assert (packed.runner == "lean") >= (name in LEAN)
    packed.close()
    if packed.runner == "modules":
        with pytest.raises(UnsupportedModelError, match="runner='modules' runs it"):
            PackedModel(model, runner="lean")
    assert not [m for m in model.modules() if "forward" in m.__dict__]


def test_an_unknown_runner_is_named() -> None:
    with pytest.raises(OptionError, match="did you mean 'lean'"):
        PackedModel(family("llama").make(), runner="leen")  # type: ignore[arg-type]


def test_a_layer_that_computes_something_else_runs_through_its_module() -> None:
    model = family("llama").make()
    layer = model.model.layers[1]

    class Scaled(type(layer)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs) * 1.5

    layer.__class__ = Scaled
    with pytest.raises(UnsupportedModelError, match=r"layer 1 .* computes something else"):
        PackedModel(model, runner="lean")
    packed = PackedModel(model)
    assert packed.runner == "modules"
    packed.close()


def test_weights_that_lie_on_several_dtypes_or_shared_are_left_alone() -> None:
    model = family("llama").make()
    model.lm_head.bfloat16()
    with pytest.raises(UnsupportedModelError, match="several dtypes"):
        describe(model)
    model = family("llama").make()
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    with pytest.raises(UnsupportedModelError, match="share"):
        describe(model)
    model = family("llama").make(attention_bias=True)
    model.model.layers[1].self_attn.k_proj.bias = None
    address = model.model.layers[0].self_attn.q_proj.weight.data_ptr()
    with pytest.raises(UnsupportedModelError, match="only some have a bias"):
        describe(model)
    assert model.model.layers[0].self_attn.q_proj.weight.data_ptr() == address


def test_whoever_changes_or_watches_the_modules_is_heard() -> None:
    model = family("llama").make()
    watch = describe(model).watch
    assert watch.unchanged()
    hook = model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert not watch.unchanged()
    hook.remove()
    assert watch.unchanged()
    model.train()
    assert not watch.unchanged()
    model.eval()
    model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(model.model.layers[1].mlp.up_proj.weight.clone())
    assert not watch.unchanged()


def test_a_model_that_ran_lean_goes_on_as_before() -> None:
    model, prompt = family("qwen3").make(), one(20)
    expected = generate(model, prompt, 8)
    with mp.LLM(model, method="full", runner="lean") as llm:
        found = llm.generate(prompt["input_ids"][0].tolist(), mp.SamplingParams(max_tokens=8, temperature=0))
    assert list(found[0].completions[0].token_ids) == expected[0, 20:].tolist()
    assert torch.equal(generate(model, prompt, 8), expected)
    with mp.compress(model, "full") as cache:
        assert torch.equal(generate(model, prompt, 8, cache=cache), expected)
