"""Layers that are read while the model runs give the tokens of the model in memory, or an error that says why not."""

from __future__ import annotations

import copy
import errno
import json
import random
import struct
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import millpond as mp
from millpond.engine.config import EngineConfig
from millpond.engine.engine import Engine
from millpond.engine.offload.model_size import model_size
from millpond.engine.offload.open import Opened, open_in_memory
from millpond.engine.offload.plan import Plan, save_plan
from millpond.engine.offload.planner import EXAMPLE
from millpond.engine.request import Request
from millpond.errors import BudgetError, DataError, OptionError, UnsupportedModelError
from millpond.models.load import load_model
from tests.helpers.hf.families import VOCABULARY, family
from tests.helpers.tiers.backends import FaultyFile, ShuffledBackend
from tests.helpers.tiers.page_cache import cached_bytes, drop

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

FAMILIES = ["llama", "qwen3", "opt", "gpt_neox"]
METHODS = ["full", "h2o", "snapkv", "ada", "streaming", "kvmerger"]
CODECS = ["auto", "int4", "kivi4"]
LENGTHS = [5, 230, 17, 64, 111, 9, 150, 33, 80]
MEMORY = "8MiB"
N_LAYERS = 5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name in [*FAMILIES, "mistral", "qwen2"]:
        model(name).save_pretrained(root / name, max_shard_size="300kB")
    return {path.name: path for path in root.iterdir()}


@cache
def model(name: str, width: int = 128) -> Any:
    size = {"hidden_size": width, "word_embed_proj_dim": width} if name == "opt" else {"hidden_size": width}
    return family(name).make(num_hidden_layers=N_LAYERS, **size, **({"head_dim": 32} if name == "qwen3" else {}))


def prompt(length: int) -> tuple[int, ...]:
    return tuple(random.Random(length).choices(range(3, VOCABULARY), k=length))


def options(method: str, codec: str = "auto", name: str = "llama") -> dict[str, Any]:
    absolute = method == "streaming" and (codec != "auto" or name == "opt")  # codes and learned positions do not turn
    return {
        "method": method,
        "budget": None if method == "full" else "20%",
        "codec": codec,
        "max_step_tokens": 256,
        "max_running": 16,
        "options": {"positions": "absolute"} if absolute else {},
    }


def outputs(engine: Engine, **params: Any) -> list[Any]:
    chosen = mp.SamplingParams(temperature=0, **params)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for length in LENGTHS:
            engine.add(Request(request_id=str(length), prompt=prompt(length), params=chosen))
        found = {output.request_id: output for output in engine.drain()}
    return [found[str(length)] for length in LENGTHS]


def answers(engine: Engine, new: int = 10) -> list[Any]:
    return [one.error or one.completions[0].token_ids for one in outputs(engine, max_tokens=new)]


@cache
def in_memory(name: str, method: str, codec: str = "auto") -> list[Any]:
    engine = Engine(model(name), **options(method, codec, name))
    try:
        return answers(engine)
    finally:
        engine.close()


def opened(
    folder: Path, plan: Plan | None = None, config: dict[str, Any] | None = None, memory: str = MEMORY, **streaming: Any
) -> Opened:
    plan = plan or Plan(weights={"disk": 1.0}, slots=2, prompt_rows=256)
    return open_in_memory(folder, memory, plan, None, EngineConfig(**(config or options("h2o"))), **streaming)


def engine_of(found: Opened) -> Engine:
    return Engine(found.model, None, found.config, streamed=found.streamed)


@pytest.mark.covering
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_the_model_in_memory(name: str, method: str, codec: str, folders: dict[str, Path]) -> None:
    found = opened(folders[name], config=options(method, codec, name))
    engine = engine_of(found)
    tokens = answers(engine)
    assert tokens == in_memory(name, method, codec)
    assert len(set(tokens)) > 5, "answers differ, so that mixed-up requests would be seen"
    assert found.ledger.peak("host") <= mp.Budget.parse(MEMORY).amount
    engine.close()
    assert found.ledger.by_purpose("host").get("weights") is None


@pytest.mark.parametrize("name", ["mistral", "qwen2"])
def test_other_native_families(name: str, folders: dict[str, Path]) -> None:
    engine = engine_of(opened(folders[name]))
    assert answers(engine) == in_memory(name, "h2o")
    engine.close()


@pytest.mark.covering
@pytest.mark.parametrize("slots", [2, 3, 5])
@pytest.mark.parametrize("share", [0.0, 0.4, 0.8])
def test_layers_that_stay_change_nothing(share: float, slots: int, folders: dict[str, Path]) -> None:
    plan = Plan(weights={"host": share, "disk": 1 - share}, slots=slots, prompt_rows=256)
    engine = engine_of(opened(folders["llama"], plan))
    assert answers(engine) == in_memory("llama", "h2o")
    engine.close()


@pytest.mark.covering
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_delays_and_order_of_reads_change_nothing(seed: int, overlap: bool, folders: dict[str, Path]) -> None:
    plan = Plan(weights={"disk": 1.0}, slots=3, prompt_rows=256)
    engine = engine_of(opened(folders["llama"], plan, backend=ShuffledBackend(seed), overlap=overlap))
    assert answers(engine) == in_memory("llama", "h2o")
    engine.close()


def test_one_sequence_in_each_sweep(folders: dict[str, Path]) -> None:
    """The row schedule with a micro-batch of one gives the same tokens with more sweeps."""
    read = {}
    for schedule in ("row", "zigzag"):
        plan = Plan(weights={"disk": 1.0}, slots=2, prompt_rows=256, schedule=schedule, micro_batch=1)
        found = opened(folders["llama"], plan)
        engine = engine_of(found)
        assert answers(engine) == in_memory("llama", "h2o")
        assert found.streamed is not None
        read[schedule] = found.streamed.bytes_read
        engine.close()
    assert read["row"] > 4 * read["zigzag"]


# ---------------------------------------------------------------------- faults


@pytest.fixture
def faulty(folders: dict[str, Path]) -> Iterator[Opened]:
    FaultyFile.fault, FaultyFile.times = None, 0
    found = opened(folders["llama"], open_file=FaultyFile)
    yield found
    FaultyFile.fault = None


@pytest.mark.parametrize("fault", [OSError(errno.EIO, "Input/output error"), 4096])
def test_a_read_that_fails_once_is_made_again(fault: Any, faulty: Opened) -> None:
    engine = engine_of(faulty)
    FaultyFile.fault, FaultyFile.times = fault, 1
    assert answers(engine) == in_memory("llama", "h2o")
    assert FaultyFile.times == 0
    engine.close()


@pytest.mark.parametrize("fault", [OSError(errno.EIO, "Input/output error"), 0])
def test_a_read_that_fails_twice_ends_the_requests_of_its_step_alone(fault: Any, faulty: Opened) -> None:
    engine = engine_of(faulty)
    FaultyFile.fault, FaultyFile.times = fault, 8  # twice ahead and twice when it is needed, of each slot
    found = answers(engine)
    errors = [one for one in found if isinstance(one, Exception)]
    assert errors
    assert all(isinstance(one, DataError) for one in errors)
    for part in ("safetensors at offset", "bytes wanted", "read in each of 2 tries"):
        assert part in str(errors[0])
    expected = in_memory("llama", "h2o")
    assert all(one == right for one, right in zip(found, expected, strict=True) if not isinstance(one, Exception))
    FaultyFile.times = 0
    assert answers(engine) == expected
    engine.check_integrity()
    engine.close()


# ---------------------------------------------------------------------- folders


def copy_of(folder: Path, to: Path) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def single(name: str, to: Path, **changes: Any) -> Path:
    family(name).make(**changes).save_pretrained(to)
    return to


def test_a_file_that_was_cut_off(tmp_path: Path) -> None:
    file = single("llama", tmp_path / "m") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataError, match="and its header describes"):
        mp.LLM(tmp_path / "m", memory="8MiB")


def test_a_header_that_was_changed(tmp_path: Path) -> None:
    file = single("llama", tmp_path / "m") / "model.safetensors"
    whole = file.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    header["model.norm.weight"]["shape"] = [33]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    assert len(text) == length
    file.write_bytes(whole[:8] + text + whole[8 + length :])
    with pytest.raises(DataError, match="shape"):
        mp.LLM(tmp_path / "m", memory="8MiB")
    file.write_bytes(struct.pack("<Q", 1 << 60) + whole[8:])
    with pytest.raises(DataError, match="claims a header"):
        mp.LLM(tmp_path / "m", memory="8MiB")


def test_a_missing_shard_and_a_missing_tensor(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copy_of(folders["llama"], tmp_path / "m")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"].pop("model.norm.weight")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"no tensor 'model\.norm\.weight'"):
        mp.LLM(folder, memory="8MiB")
    next(folder.glob("model-*.safetensors")).unlink()
    with pytest.raises(DataError, match="cannot be opened"):
        mp.LLM(folder, memory="8MiB")


def test_too_little_memory_says_how_much_is_needed(folders: dict[str, Path]) -> None:
    limits = {"max_step_tokens": 32, "max_running": 4, "method": "full", "machine": EXAMPLE}
    with pytest.raises(BudgetError, match="the smallest that runs") as refused:
        mp.LLM(folders["llama"], memory=1000, **limits)
    smallest = int(str(refused.value).split("runs, ")[1].split(" ")[0].replace(",", ""))
    with pytest.raises(BudgetError, match=f"{smallest:,}"):
        mp.LLM(folders["llama"], memory=smallest - 1, **limits)
    with mp.LLM(folders["llama"], memory=smallest, **limits) as llm:
        assert llm.plan is not None
        assert llm.plan.plan.share("weights", "disk") == 1
        assert sum(llm.plan.bytes["host"].values()) <= smallest
        out = llm.generate([list(prompt(64))], mp.SamplingParams(max_tokens=10, temperature=0))
        assert out[0].completions[0].token_ids == in_memory("llama", "full")[LENGTHS.index(64)]
        assert llm.stats().kv_limit == llm.plan.bytes["host"]["kv"]


def test_a_model_that_fits_is_loaded_whole(folders: dict[str, Path]) -> None:
    with mp.LLM(folders["llama"], memory="64MiB") as llm:
        assert llm.plan is not None
        assert "disk" not in llm.plan.bytes
        assert llm.stats().kv_limit == llm.plan.bytes["host"]["kv"] > 32 << 20
        assert "kv" in str(llm.plan)


def test_a_limit_of_kv_beside_that_of_memory(folders: dict[str, Path]) -> None:
    with mp.LLM(folders["llama"], memory="64MiB", kv_memory="1MiB") as llm:
        assert llm.stats().kv_limit == 1 << 20
    with pytest.raises(BudgetError, match="that memory leaves for KV"):
        mp.LLM(folders["llama"], memory="64MiB", kv_memory="64MiB")


def test_without_memory_nothing_changes_and_ids_need_no_tokenizer(folders: dict[str, Path]) -> None:
    with mp.LLM(folders["llama"], **options("h2o")) as llm:
        assert llm.plan is None
        assert llm.tokenizer is None
        out = llm.generate([list(prompt(64))], mp.SamplingParams(max_tokens=10, temperature=0))
    assert out[0].completions[0].token_ids == in_memory("llama", "h2o")[LENGTHS.index(64)]


def test_what_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="safetensors"):
        mp.LLM(tmp_path / "not-there", memory="1GiB")
    (tmp_path / "empty").mkdir()
    with pytest.raises(OptionError, match="no folder with a model"):
        mp.LLM(tmp_path / "empty", memory="1GiB")
    folder = single("llama", tmp_path / "bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(OptionError, match="save_pretrained"):
        mp.LLM(folder, memory="1GiB")
    with pytest.raises(UnsupportedModelError, match="without memory="):
        mp.LLM(single("gemma2", tmp_path / "gemma"), memory="1GiB")
    with pytest.raises(UnsupportedModelError, match="without memory="):
        mp.LLM(single("gpt2", tmp_path / "gpt2"), memory="1GiB")
    with pytest.raises(OptionError, match="as they were saved"):
        mp.LLM(folders["llama"], memory="8MiB", dtype="bf16")
    with pytest.raises(OptionError, match="runner='modules'"):
        mp.LLM(folders["llama"], memory="8MiB", runner="modules", plan=Plan(weights={"disk": 1.0}))
    with pytest.raises(OptionError, match="opened here"):
        mp.LLM(model("llama"), memory="1GiB")
    with pytest.raises(OptionError, match="made for a model with the fingerprint abc"):
        mp.LLM(folders["llama"], plan=Plan(model="abc"))
    with pytest.raises(OptionError, match="name a folder for it with disk="):
        mp.LLM(folders["llama"], memory="8MiB", weights="int4")
    with pytest.raises(TypeError, match="memroy"):
        mp.LLM(folders["llama"], memroy="1GiB")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_and_a_tied_head(dtype: torch.dtype, tmp_path: Path) -> None:
    family("llama").make(tie_word_embeddings=True, num_hidden_layers=4).to(dtype).save_pretrained(tmp_path / "m")
    found = opened(tmp_path / "m", config=options("full"), memory="24MiB")
    engine = engine_of(found)
    expected = Engine(load_model(tmp_path / "m", "auto"), **options("full"))  # its rotations are float32
    assert answers(engine) == answers(expected)
    engine.close()
    expected.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_in_bf16_log_probabilities_are_those_of_the_model_in_memory(name: str, tmp_path: Path) -> None:
    """With the same chunks of prompts, bit by bit: sums do not depend on whether weights of a layer lie together."""
    made = copy.deepcopy(model(name, 512))  # sums of fewer numbers have one order
    made.to(torch.bfloat16).save_pretrained(tmp_path / "m")
    engine = engine_of(opened(tmp_path / "m", config=options("full", "auto", name), memory="128MiB"))
    expected = Engine(load_model(tmp_path / "m", "auto"), **options("full", "auto", name))
    found, right = (outputs(each, max_tokens=10, logprobs=1, prompt_logprobs=1) for each in (engine, expected))
    for one, other in zip(found, right, strict=True):
        assert one.prompt_logprobs == other.prompt_logprobs
        assert one.completions[0].logprobs == other.completions[0].logprobs is not None
    engine.close()
    expected.close()


def test_the_page_cache_stays_empty(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    model("llama").save_pretrained(folder)
    weights = folder / "model.safetensors"
    drop(weights)
    with mp.LLM(folder, plan=Plan(weights={"disk": 1.0})) as llm:
        llm.generate([[3, 4, 5]], mp.SamplingParams(max_tokens=3, temperature=0))
        streamed = llm.engine._model._streamed
        assert streamed is not None
        direct = all(file.direct for file in streamed._files.values())  # type: ignore[attr-defined]
    cached = cached_bytes(weights)
    if not direct or cached is None:
        pytest.skip("the file system has no direct reads, or pages in the cache cannot be counted")
    assert cached == 0


@pytest.mark.slow
def test_the_page_cache_stays_empty_and_the_process_small(tmp_path: Path) -> None:
    """The page cache holds nothing of the files, and the process not much more than the limit."""
    made = family("llama").make(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=16, num_attention_heads=8, num_key_value_heads=4
    )
    made.save_pretrained(tmp_path / "m")
    whole = (tmp_path / "m" / "model.safetensors").stat().st_size
    code = CHILD.format(folder=str(tmp_path / "m"), memory=whole // 4)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown, cached, direct = json.loads(done.stdout.splitlines()[-1])
    assert grown < whole // 4 + (100 << 20)
    if not direct or cached is None:
        pytest.skip("the file system has no direct reads, or pages in the cache cannot be counted")
    assert cached == 0


CHILD = """
import json, pathlib, resource, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, ".")
import millpond as mp
from millpond.engine.engine import Engine
from tests.helpers.tiers.page_cache import cached_bytes, drop
from transformers import AutoModelForCausalLM
path = pathlib.Path({folder!r})
weights = path / "model.safetensors"
drop(weights)
with mp.LLM("pond-recall") as llm:
    llm.generate([[5, 6, 7]], mp.SamplingParams(max_tokens=2))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
from millpond.engine.offload.planner import EXAMPLE
with mp.LLM(path, memory={memory}, machine=EXAMPLE, max_step_tokens=64, max_running=16) as llm:
    llm.generate([list(range(3, 30)) for _ in range(6)], mp.SamplingParams(max_tokens=3, temperature=0))
    direct = all(file.direct for file in llm.engine._model._streamed._files.values())
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([(after - before) * 1024, cached_bytes(weights), direct]))
"""


def test_a_plan_comes_from_a_file_too(folders: dict[str, Path], tmp_path: Path) -> None:
    plan = Plan(weights={"host": 0.5, "disk": 0.5}, model=model_size(folders["llama"]).fingerprint)
    save_plan(plan, tmp_path / "plan.json")
    params = mp.SamplingParams(max_tokens=4, temperature=0)
    found = []
    for given in (plan, tmp_path / "plan.json", None):
        with mp.LLM(folders["llama"], plan=given) as llm:
            found.append(llm.generate([[5, 6, 7]], params)[0].completions[0].token_ids)
            assert (llm.plan is not None and "disk" in str(llm.plan)) == (given is not None)
    assert found[0] == found[1] == found[2]
