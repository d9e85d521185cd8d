"""A model in two processes: the tokens of one process, and errors where a stage is lost."""

from __future__ import annotations

import copy
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

import millpond as mp
from millpond.cluster.pipeline import PipelineLLM
from millpond.cluster.stage_model import StageLink, StageLostError, cut
from millpond.errors import MillpondError, OptionError, UnsupportedModelError
from tests.helpers.engine.helpers import prompt
from tests.helpers.hf.families import COMMON, build, shared_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # a share of a few tokens
PROMPTS = [prompt(length) for length in (40, 57, 9, 31)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    options = {"head_dim": 16, "num_hidden_layers": 3, "tie_word_embeddings": True}
    build("LlamaConfig", "LlamaForCausalLM", **(COMMON | options)).save_pretrained(path)
    return path


def params(**options: object) -> mp.SamplingParams:
    return mp.SamplingParams(**{"max_tokens": 12, "temperature": 0.8, "seed": 7, "ignore_eos": True} | options)  # type: ignore[arg-type]


def tokens(outputs: list[mp.RequestOutput]) -> list[tuple[int, ...]]:
    return [output.completions[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    ("method", "budget", "codec", "micro_batches"),
    [
        pytest.param("full", None, "auto", 1, marks=pytest.mark.slow),
        pytest.param("h2o", "30%", "int4", 2, marks=pytest.mark.slow),
        pytest.param("snapkv", "30%", "auto", 2, marks=pytest.mark.slow),
        pytest.param("streaming", 16, "auto", 1, marks=pytest.mark.slow),
    ],
)
def test_two_processes_give_the_tokens_of_one(
    folder: Path, method: str, budget: Any, codec: str, micro_batches: int
) -> None:
    options = {"method": method, "budget": budget, "codec": codec, "max_step_tokens": 16}
    with mp.LLM(str(folder), **options) as llm:  # type: ignore[arg-type]
        expected = tokens(llm.generate(PROMPTS, params()))
    with PipelineLLM(folder, threads=1, micro_batches=micro_batches, **options) as pipeline:  # type: ignore[arg-type]
        assert tokens(pipeline.generate(PROMPTS, params())) == expected
        with pytest.raises(OptionError):
            pipeline.generate([prompt(5), ()], params())
        assert tokens(pipeline.generate(PROMPTS[:2], params())) == expected[:2]
        assert pipeline._stage is not None
        assert [len(one.engine._parts.snapshots._shapes) for one in pipeline._stage._llms] == [1] * micro_batches
        (drawn,) = tokens(pipeline.generate(PROMPTS[0], params(seed=None)))
        assert len(drawn) == 12, "both processes draw the same tokens without a seed"
        (process,) = pipeline._others.processes
        process.kill()
        process.join()
        with pytest.raises(StageLostError, match="ended"):
            pipeline.generate(PROMPTS, params())
        with pytest.raises(StageLostError, match="closed"):
            pipeline.generate(PROMPTS, params())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stages": 1}, "from 2 to"),
        ({"micro_batches": 0}, "from 1 to"),
        ({"method": "pyramidkv"}, "pyramidkv"),
        ({"stages": 4}, "a model of 3 layers"),
    ],
)
def test_what_a_pipeline_refuses(folder: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(MillpondError, match=said):
        PipelineLLM(folder, threads=1, **options)


def test_families_that_cannot_be_cut() -> None:
    with pytest.raises(UnsupportedModelError, match="without windows"):
        cut(copy.deepcopy(shared_model("gemma3")), 0, 2, None, None)


def test_a_link_takes_tensors_of_its_own_step_alone() -> None:
    ends = Pipe()
    one, other = (StageLink(end, "the other stage") for end in ends)
    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(1, 2, 3)
    one.send(b"a" * 16, tensor)
    assert torch.equal(other.receive(b"a" * 16, (1, 2, 3), torch.bfloat16), tensor)
    one.send(b"a" * 16, tensor)
    with pytest.raises(StageLostError, match="another step"):
        other.receive(b"b" * 16, (1, 2, 3), torch.bfloat16)
    one.send(b"a" * 16, tensor)
    with pytest.raises(StageLostError, match="another step"):
        other.receive(b"a" * 16, (1, 3, 3), torch.bfloat16)
    one.send(b"a" * 16, tensor)
    with pytest.raises(StageLostError, match="sent too much"):
        other.receive(b"a" * 16, (1, 1, 3), torch.bfloat16)
    other.close()
    with pytest.raises(StageLostError, match="has ended"):
        one.send(b"a" * 16, tensor)
