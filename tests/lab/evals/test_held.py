"""What a run writes down as kept and held is what the cache keeps and holds."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from millpond.hf.compress import compress
from millpond.methods import METHODS
from millpond.models.load import load_model, load_tokenizer
from millpond_lab.evals.candidates.candidate import find_candidate
from millpond_lab.evals.decoding.batch import PromptBatch, encode
from millpond_lab.evals.decoding.record import Protocol
from millpond_lab.evals.harness.evaluator import Evaluator
from millpond_lab.evals.sample import Sample
from millpond_lab.evals.spec import Spec
from millpond_lab.evals.task import TASKS

#: Those whose default always keeps more than the budget of this test, and one that takes tokens only.
OPTIONS = {"layer_table": ":table=3;1", "infllm": ":sinks=4:block=8:local=0.25", "dms": ":window=32"}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def pond() -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[Sample]]:
    model, tokenizer = load_model("pond-recall"), load_tokenizer("pond-recall")
    return model, tokenizer, list(TASKS.get("recall")(length=320, pairs=8).samples(tokenizer, 2, 0))


@pytest.mark.covering
@pytest.mark.parametrize("protocol", ["aware", "agnostic"])
@pytest.mark.parametrize("method", METHODS.names())
def test_the_kept_column_is_what_the_cache_keeps(
    method: str, protocol: Protocol, pond: tuple[PreTrainedModel, PreTrainedTokenizerBase, list[Sample]]
) -> None:
    model, tokenizer, samples = pond
    candidate = find_candidate(Spec.parse(method + OPTIONS.get(method, "")))
    budget = "" if candidate.keeps_all else "120"
    compare(model, tokenizer, samples, method + OPTIONS.get(method, ""), budget, "auto", protocol)


@pytest.mark.parametrize(
    ("method", "budget", "codec"), [("h2o", "25%", "int4"), ("ada", "256KiB", "rotated2"), ("full", "", "int8")]
)
def test_bytes_are_those_of_the_codec_and_the_full_cache_is_in_the_models_numbers(
    method: str, budget: str, codec: str, pond: tuple[PreTrainedModel, PreTrainedTokenizerBase, list[Sample]]
) -> None:
    compare(*pond, method, budget, codec, "aware")


def compare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    samples: list[Sample],
    method: str,
    budget: str,
    codec: str,
    protocol: Protocol,
) -> None:
    """Records of a batch of prompts beside the statistics of caches that read each prompt alone."""
    spec = Spec.parse(method)
    prompts = tuple(prompt for sample in samples for prompt in encode(sample, tokenizer, "generate", protocol))
    task = TASKS.get("recall")(length=320)
    examiner = Evaluator("cell", model, tokenizer, task, find_candidate(spec), budget, codec, limit=None)
    for prompt, record in zip(prompts, examiner.examine(PromptBatch(protocol, "generate", prompts)), strict=True):
        with (
            torch.inference_mode(),
            compress(model, spec.name, budget or None, codec, tokenizer=tokenizer, **spec.options) as cache,
        ):
            model(torch.tensor([prompt.opening]), cache=cache)
            stats = cache.stats()
        kept = sum(entries for layer in stats.stored for sequence in layer for entries in sequence)
        assert not record.failure
        assert record.kept_share == pytest.approx(kept / (kept + stats.evicted), abs=1e-9)
        assert (record.kv_bytes, record.full_kv_bytes) == (stats.kv_bytes, stats.full_kv_bytes)
