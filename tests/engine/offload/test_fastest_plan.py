"""`LLM(memory=...)` searches for a plan: what it says fits opens, runs, and stays inside the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import millpond as mp
from millpond.engine.offload import planner
from millpond.engine.offload.machine import MachineConstants
from millpond.engine.offload.planner import EXAMPLE
from millpond.errors import BudgetError, OptionError
from tests.helpers.hf.families import family

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

MiB = 2**20
PROMPTS = [[5 + i % 80 for i in range(first, first + 40)] for first in range(3)]
GREEDY = mp.SamplingParams(max_tokens=6, temperature=0)
FOLDER: list[Path] = []


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A model in float32 whose layers are most of it."""
    place = tmp_path_factory.mktemp("models") / "llama"
    size = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 16, "max_position_embeddings": 512}
    family("llama").make(**size).save_pretrained(place)
    FOLDER[:] = [place]


def opened(memory: int, **options: Any) -> mp.LLM:
    chosen = {"method": "full", "max_step_tokens": 64, "max_running": 64, "machine": EXAMPLE, **options}
    return mp.LLM(FOLDER[0], memory=memory, **chosen)


def tokens(llm: mp.LLM) -> list[tuple[int, ...]]:
    return [tuple(out.completions[0].token_ids) for out in llm.generate(PROMPTS, GREEDY)]


def smallest(**options: Any) -> int:
    with pytest.raises(BudgetError, match="below the smallest that runs") as refused:
        opened(1000, **options)
    return int(str(refused.value).split("runs, ")[1].split(" ")[0].replace(",", ""))


@pytest.fixture(scope="module")
def expected(folder: None) -> list[tuple[int, ...]]:
    with mp.LLM(FOLDER[0], method="full", max_step_tokens=64) as llm:
        return tokens(llm)


def test_more_memory_keeps_more_layers_and_all_of_it_opens(expected: list[tuple[int, ...]]) -> None:
    least, kept = smallest(), []
    for memory in (least, least + 2 * MiB, least + 5 * MiB, least + 10 * MiB, 64 * MiB):
        with opened(memory) as llm:
            assert llm.plan is not None
            counted = llm.plan.bytes["host"]
            assert sum(counted.values()) <= memory
            kept.append(llm.plan.plan.share("weights", "host"))
            prediction = llm.plan.plan.prediction
            if prediction is not None:
                assert prediction.total("host") <= memory
                for purpose in ("activations", "logits", "slots"):
                    assert counted.get(purpose, 0) <= prediction.bytes["host"].get(purpose, 0)
                assert counted["kv"] >= prediction.bytes["host"]["kv"]
                for text in ("planned for prompts", "predicted", "bound by", "new tokens/s", "block:"):
                    assert text in str(llm.plan)
            assert tokens(llm) == expected
    assert kept[0] == 0
    assert kept == sorted(kept)
    assert len(set(kept)) > 2
    assert kept[-1] == 1


@pytest.mark.parametrize("step", range(7))
def test_every_memory_above_the_smallest_opens(step: int) -> None:
    """The planner and the engine count by one formula: no plan is refused when it is opened."""
    options = {"method": "snapkv", "budget": "20%", "codec": ("auto", "int8")[step % 2], "max_step_tokens": 128}
    least = smallest(**options)
    with opened(least + step * 1_000_003, **options) as llm:
        assert llm.plan is not None
        assert sum(llm.plan.bytes["host"].values()) <= least + step * 1_000_003


def test_the_workload_decides() -> None:
    memory = smallest() + 9 * MiB
    blocks = {}
    for prompt, new in ((64, 16), (300, 60)):
        with opened(memory, prompt_tokens=prompt, new_tokens=new) as llm:
            assert llm.plan is not None
            assert f"{prompt} + {new} tokens" in str(llm.plan)
            blocks[prompt] = llm.plan.plan.block
    assert blocks[64] > blocks[300]


def test_limits_of_the_engine_hold() -> None:
    memory = smallest() + 9 * MiB
    with opened(memory, max_running=2, max_step_tokens=32) as llm:
        assert llm.plan is not None
        assert (llm.plan.plan.block or 0) <= 2
        assert llm.plan.plan.prompt_rows <= 32
    with opened(memory, kv_memory="3MiB") as llm:
        assert 0 < (llm.stats().kv_limit or 0) <= 3 * MiB
    with pytest.raises(BudgetError, match=r"kv_memory=2,000 bytes holds no sequence"):
        opened(memory, kv_memory=2000)


def test_a_machine_is_measured_only_for_a_model_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[tuple[Path, Path | None]] = []

    def measured(folder: Path, *, again: bool, report: Any, file: Path | None = None) -> MachineConstants:
        calls.append((folder, file))
        return EXAMPLE

    monkeypatch.setattr(planner, "machine_constants", measured)
    opened(64 * MiB, machine=None).close()
    with pytest.raises(BudgetError):
        opened(1000, machine=None)
    assert calls == []
    memory = smallest() + 5 * MiB
    opened(memory, machine=None).close()
    ((_, file),) = calls
    assert file is not None, "without a folder to write to the model's own files are read"
    assert file.suffix == ".safetensors"
    opened(memory, machine=None, disk=tmp_path, plan="auto").close()
    assert calls[-1] == (tmp_path, None)
    assert list(tmp_path.iterdir()) == []


def test_what_is_refused(tmp_path: Path) -> None:
    memory = 16 * MiB
    for options, message in (
        ({"prompt_tokens": 64}, "give both"),
        ({"prompt_tokens": 0, "new_tokens": 5}, "prompt_tokens=0 must be"),
        ({"prompt_tokens": 10**6, "new_tokens": 5}, "context"),
        ({"plan": 7}, "plan=7 must be a Plan"),
        ({"plan": mp.Plan(), "prompt_tokens": 5, "new_tokens": 5, "machine": None}, "one is given"),
        ({"plan": mp.Plan()}, "machine= is for making a plan"),
        ({"disk": tmp_path / "nowhere"}, "there is no such folder"),
    ):
        with pytest.raises(OptionError, match=message):
            opened(memory, **options)
    for options, message in (
        ({"plan": "auto"}, "give memory="),
        ({"disk": tmp_path}, "disk= belongs to memory="),
        ({"machine": EXAMPLE}, "machine= belongs to memory="),
        ({"verify": "always"}, "verify= belongs to memory="),
    ):
        with pytest.raises(OptionError, match=message):
            mp.LLM(FOLDER[0], **options)
