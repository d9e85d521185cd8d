"""`pond-text` and `pond-text-long`: loaded by name, better than chance on text, described by their cards."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from helpers.models import needs_pond_text
from millpond.models.load import load_model, load_tokenizer, resolve
from millpond_lab.train.text.eval import perplexity
from millpond_lab.train.text.recipe import TextRecipe, recipe_named

pytestmark = needs_pond_text

DATA = Path(__file__).parents[4] / "shared" / "data" / "text"
HELD_OUT = DATA / "gutenberg" / "great_expectations.txt"
#: Written for this test.
TEXT = (
    "The old man came into the room and looked at the fire for a long time. He said that he had seen the young lady "
    "in the garden, and that she had asked him for a letter. “I have no letter,” said he, “and I do not think that "
    "there will be one.” She did not answer him, but went to the window and stood there till it was dark."
)


@pytest.fixture(scope="module", params=["cpu", "cpu-long"])
def recipe(request: pytest.FixtureRequest) -> TextRecipe:
    return recipe_named(request.param)


@pytest.fixture(scope="module")
def folder(recipe: TextRecipe) -> Path:
    return Path(resolve(recipe.model))


@pytest.fixture(scope="module")
def model(folder: Path) -> LlamaForCausalLM:
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(loaded, LlamaForCausalLM)
    return loaded


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return loaded


def test_the_folder_is_small_and_complete(folder: Path) -> None:
    names = {file.name for file in folder.iterdir()}
    needed = {"MODEL_CARD.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert names == needed | {"tokenizer_config.json"}
    assert (folder / "model.safetensors").stat().st_size <= 64 * 2**20
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118


def test_it_loads_by_its_name(recipe: TextRecipe, folder: Path) -> None:
    assert folder.is_dir()
    model, tokenizer = load_model(recipe.model), load_tokenizer(recipe.model)
    assert model.dtype == torch.bfloat16
    inputs = tokenizer("It was a dark night, and", return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=8)
    assert out.shape == (1, inputs["input_ids"].shape[1] + 8)


def test_its_shape_is_that_of_the_recipe(recipe: TextRecipe, model: LlamaForCausalLM) -> None:
    config = model.config
    assert 5e6 <= model.num_parameters() <= 30e6
    assert (config.num_hidden_layers, config.num_attention_heads) == (recipe.layers, recipe.heads)
    assert (config.num_key_value_heads, config.max_position_embeddings) == (recipe.kv_heads, recipe.context)
    assert config.tie_word_embeddings


def test_text_comes_back_as_it_was(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer(TEXT)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == TEXT
    assert tokenizer("x", return_tensors="pt")["input_ids"].shape == (1, 2)


@torch.inference_mode()
def test_it_has_learned_the_language(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    """Text is likelier than the same tokens in another order, and far likelier than chance."""
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    order = torch.randperm(ids.shape[1] - 1, generator=torch.Generator().manual_seed(0)) + 1
    mixed = torch.cat([ids[:, :1], ids[:, order]], 1)
    loss = float(model(ids, labels=ids).loss)
    assert loss < float(model(mixed, labels=mixed).loss) - 1
    assert loss < 0.6 * math.log(len(tokenizer))


@pytest.mark.skipif(not HELD_OUT.is_file(), reason="the held-out novel does not lie beside the checkout")
def test_the_card_says_what_the_weights_do(recipe: TextRecipe, folder: Path, model: LlamaForCausalLM) -> None:
    card = (folder / "MODEL_CARD.md").read_text(encoding="utf-8")
    row = re.search(r"^\| great_expectations\.txt \| 512 \| ([\d,]+) \| ([\d.]+) \| ([\d.]+) \|", card, re.MULTILINE)
    assert row is not None
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    few = perplexity(model, tokenizer, HELD_OUT, 512, windows=24)
    assert math.log(few.perplexity) == pytest.approx(math.log(float(row[2])), abs=0.25)  # a part of the same book
    config = json.loads((folder / "config.json").read_text())
    assert f"{config['vocab_size']:,} byte-level BPE tokens" in card
    assert f"# {recipe.model}\n" in card
    assert f"A Llama of {model.num_parameters():,} parameters" in card
