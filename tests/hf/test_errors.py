"""Every mistake is told by a typed error that names the value, the rule and the way out."""

from functools import partial

import pytest
import torch
import transformers

import millpond as mp
from millpond.hf.layer_budgets import BudgetFloorWarning
from tests.helpers.hf.families import build, family, generate, left_padded, one, shared_model, tiny_llava, with_image

TINY = {"vocab_size": 50, "hidden_size": 16, "bos_token_id": 1, "eos_token_id": 2}
BYPASSING = [
    ("BloomConfig", "BloomForCausalLM", {"n_layer": 1, "n_head": 2}),
    ("FalconConfig", "FalconForCausalLM", {"num_hidden_layers": 1, "num_attention_heads": 2}),
    ("GPTJConfig", "GPTJForCausalLM", {"n_layer": 1, "n_head": 2, "n_embd": 16, "rotary_dim": 4}),
    ("GPTNeoConfig", "GPTNeoForCausalLM", {"num_layers": 1, "num_heads": 2, "attention_types": [[["global"], 1]]}),
    ("CodeGenConfig", "CodeGenForCausalLM", {"n_layer": 1, "n_head": 4, "n_embd": 16, "rotary_dim": 4}),
    ("MptConfig", "MptForCausalLM", {"n_layers": 1, "n_heads": 2}),
    ("XGLMConfig", "XGLMForCausalLM", {"num_layers": 1, "attention_heads": 2, "ffn_dim": 16}),
    ("CTRLConfig", "CTRLLMHeadModel", {"n_layer": 1, "n_head": 2, "n_embd": 16, "dff": 16}),
]


# ---------------------------------------------------------------------------------- models


@pytest.mark.parametrize(("config", "model", "options"), BYPASSING, ids=[m for _, m, _ in BYPASSING])
def test_families_that_bypass_the_interface(config, model, options):
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**TINY, **options))
    with pytest.raises(mp.UnsupportedModelError, match=rf"{model} \(model type '{made.config.model_type}'\).*bypasses"):
        mp.compress(made)


def test_encoder_decoders():
    config = transformers.T5Config(vocab_size=50, d_model=16, num_layers=1, num_heads=2, d_ff=16, d_kv=8)
    with pytest.raises(mp.UnsupportedModelError, match="T5ForConditionalGeneration is an encoder-decoder"):
        mp.compress(transformers.T5ForConditionalGeneration(config))


def test_layers_without_entries():
    config = transformers.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1)
    with pytest.raises(mp.UnsupportedModelError, match="MambaForCausalLM has no attention layers"):
        mp.compress(transformers.MambaForCausalLM(config))


def test_not_a_model():
    with pytest.raises(mp.UnsupportedModelError, match="Linear is not a transformers model"):
        mp.compress(torch.nn.Linear(2, 2))


def test_an_encoder():
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.BertLMHeadModel(transformers.BertConfig(**TINY, **sizes)).eval()
    with mp.compress(model, "full") as cache, pytest.raises(mp.UnsupportedModelError, match="mask that is not causal"):
        model(input_ids=one(6)["input_ids"] % 50, cache=cache)


def test_a_mask_of_four_dimensions():
    with mp.compress(shared_model("llama"), "h2o", 8, attach=False) as cache, torch.no_grad():
        square = torch.ones(1, 1, 6, 6, dtype=torch.bool)
        with pytest.raises(mp.UnsupportedModelError, match="mask of 4 dimensions, by the caller"):
            shared_model("llama")(one(6)["input_ids"], attention_mask=square, cache=cache)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_that_does_not_use_the_cache(layer):
    model = family("llama").make()
    model.model.layers[layer].self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    message = f"layer {layer} was given no keys.*does not use its cache"
    with mp.compress(model, "h2o", 8) as cache, pytest.raises(mp.UnsupportedModelError, match=message):
        model(**one(6), cache=cache)


# ---------------------------------------------------------------------------------- caches


@pytest.mark.parametrize("switched", [False, True])
@pytest.mark.parametrize("other", ["the same shapes", "other shapes", "a family that bypasses"])
def test_a_cache_with_another_model(other, switched):
    if other == "a family that bypasses":
        stranger = build("GPTNeoXConfig", "GPTNeoXForCausalLM", **TINY, num_hidden_layers=1, num_attention_heads=2)
    else:
        stranger = family("llama").make(**({"num_hidden_layers": 3} if other == "other shapes" else {}))
    keep = mp.compress(stranger, "full") if switched else None
    with mp.compress(shared_model("llama"), "h2o", 8, attach=False) as cache, torch.no_grad():
        with pytest.raises(mp.CacheMismatchError, match="made for one LlamaForCausalLM and met another model"):
            stranger(input_ids=one(9)["input_ids"] % 50, cache=cache)
        expected = generate(shared_model("llama"), one(9), 3)
        assert torch.equal(generate(shared_model("llama"), one(9), 3, cache=cache)[:, :10], expected[:, :10])
        with pytest.raises(mp.CacheMismatchError, match="met another model"):
            stranger(input_ids=one(9)["input_ids"] % 50, cache=cache)
        cache.check_integrity()
    if keep is not None:
        keep.close()


def test_a_switch_behind_the_back():
    model = family("llama").make()
    with mp.compress(model, "h2o", 8) as cache, torch.no_grad():
        model.config._attn_implementation = "sdpa"
        with pytest.raises(mp.UnsupportedModelError, match="attention was switched after compress"):
            model(**one(9), cache=cache)


@torch.no_grad()
def test_another_batch_size():
    model = shared_model("llama")
    with mp.compress(model, "h2o", 8) as cache:
        model(**one(9), cache=cache)
        with pytest.raises(mp.CacheMismatchError, match=r"a batch of 2 sequences met a cache of 1; call reset"):
            model(**left_padded([9, 9]), cache=cache)
        cache.check_integrity()
        cache.reset()
        model(**left_padded([9, 9]), cache=cache)


def test_questions_about_what_is_not_there():
    with mp.compress(shared_model("llama"), "h2o", 8) as cache:
        with pytest.raises(mp.CacheMismatchError, match="layer 0 holds nothing yet"):
            cache.positions(0)
        generate(shared_model("llama"), one(9), 2, cache=cache)
        with pytest.raises(mp.CacheMismatchError, match="layers 0 to 1"):
            cache.positions(2)
        with pytest.raises(mp.CacheMismatchError, match="sequence 1: the cache holds 1"):
            cache.positions(0, 1)


@pytest.mark.parametrize("how", ["forward", "generate"])
def test_attention_weights(how):
    model, settings = shared_model("llama"), {"output_attentions": True}
    run = model if how == "forward" else partial(model.generate, return_dict_in_generate=True, max_new_tokens=3)
    with mp.compress(model, "h2o", 8) as cache, pytest.raises(mp.OptionError, match="output_attentions=True cannot"):
        run(**one(9), cache=cache, **settings)


# ---------------------------------------------------------------------------------- options and budgets


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "h20"}, "unknown method 'h20'; did you mean 'h2o'"),
        ({"method": "snapkv", "windw": 4}, "unknown option of snapkv 'windw'; did you mean 'window'"),
        ({"method": "snapkv", "pool": "median"}, "pool='median' must be one of 'max', 'avg', 'none'"),
        ({"method": "h2o", "sinks": "four"}, "sinks='four' is not a valid int"),
        ({"codec": "bf15"}, "unknown codec 'bf15'; did you mean 'bf16'"),
        ({"page_slots": 12}, "page_slots=12 must be a power of two"),
        ({"memory_limit": 8}, "a limit of 8 bytes is smaller than one page"),
    ],
)
def test_options(arguments, message):
    model = shared_model("llama")
    with pytest.raises(mp.OptionError, match=message), mp.compress(model, **arguments) as cache:
        generate(model, one(9), 2, cache=cache)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("budget", ["abc", "", 0, -3, "0", "-5", "150%", "0%", 1.5, 0.0, "12.5", "3 pages", True])
def test_budgets_that_are_none(budget):
    with pytest.raises(mp.BudgetError, match="budget"):
        mp.compress(shared_model("llama"), "h2o", budget)
    assert shared_model("llama").config._attn_implementation == "sdpa"


def test_a_budget_that_is_not_wanted():
    with pytest.raises(mp.BudgetError, match="'full' keeps everything and takes no budget"):
        mp.compress(shared_model("llama"), "full", 20)


@pytest.mark.parametrize(
    ("method", "budget", "options"),
    [("h2o", 3, {}), ("snapkv", 20, {}), ("h2o", 12, {"recent": 10}), ("streaming", 2, {})],
)
def test_budgets_smaller_than_what_is_protected(method, budget, options):
    with pytest.raises(mp.BudgetError, match=rf"budget {budget} is smaller than sinks"):
        mp.compress(shared_model("llama"), method, budget, **options)


def test_bytes_smaller_than_a_page_per_head():
    model = shared_model("llama")
    with mp.compress(model, "h2o", "1KiB") as cache, pytest.raises(mp.BudgetError, match="less than one page of"):
        generate(model, one(30), 2, cache=cache)


def test_a_ratio_of_a_short_prompt_warns_and_keeps_the_least():
    model = shared_model("llama")
    with mp.compress(model, "h2o", "10%") as cache:
        with pytest.warns(BudgetFloorWarning, match="10% of a prompt of 9 tokens is 1 entries, fewer than the 4"):
            generate(model, one(9), 2, cache=cache)
        assert cache.stats().stored[0] == [[4, 4]]


# ---------------------------------------------------------------------------------- memory and numbers


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("prompt", [9, 60])
def test_a_full_pool(name, prompt):
    """The pool's limit is hit while decoding (short prompt) or in the prompt; what is cached stays readable."""
    model = shared_model(name)
    with mp.compress(model, "full", page_slots=4, memory_limit=5000) as cache:
        generate(model, one(9), 3, cache=cache)
        cache.reset()
        with pytest.raises(mp.PoolFullError, match="Raise memory_limit"):
            generate(model, one(prompt), 200, cache=cache)
        cache.check_integrity()
        stats = cache.stats()
        assert stats.reserved_bytes <= 5000
        assert stats.kv_bytes + stats.metadata_bytes > 0 or prompt == 60
        for layer, held in enumerate(stats.stored):
            if held:
                assert [len(row) for row in cache.positions(layer)] == held[0]
        with pytest.raises(mp.CacheMismatchError, match="interrupted"):
            model(**one(1), cache=cache)
        cache.reset()
        cache.check_integrity()
        assert generate(model, one(9), 3, cache=cache).shape == (1, 12)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("method", ["h2o", "snapkv", "tova"])
@pytest.mark.parametrize("when", ["prompt", "decoding"])
def test_nan_weights(name, method, when):
    if when == "decoding" and method == "snapkv":
        pytest.skip("no score is made while decoding")
    model = family(name).make()
    options = {"window": 3} if method == "snapkv" else {}
    with mp.compress(model, method, 8, **options) as cache, torch.no_grad():
        model(**one(12), cache=cache)
        broken = model.model.layers[0].self_attn.o_proj.weight
        broken[0, 0] = float("nan")
        if when == "prompt":
            cache.reset()
        with pytest.raises(mp.NumericsError, match="NaN"):
            model(input_ids=one(12 if when == "prompt" else 1)["input_ids"], cache=cache)
        cache.check_integrity()


def test_an_image_in_a_later_turn():
    """An image is text to the cache: a second turn with one runs through in the same budget."""
    model = tiny_llava()
    with mp.compress(model, "h2o", 8) as cache:
        first = generate(model, with_image(one(12), at=4), 4, cache=cache)
        ids = torch.cat([first, one(10, seed=8)["input_ids"]], 1)
        generate(model, {"input_ids": ids}, 4, cache=cache)
        assert cache.stats().stored[1] == [[8, 8]]
