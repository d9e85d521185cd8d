"""Embeddings and a head that are read while the model runs: tokens as in memory, bytes as predicted, less memory."""

from __future__ import annotations

import errno
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import millpond as mp
from millpond.engine.config import EngineConfig
from millpond.engine.engine import Engine
from millpond.engine.offload.model_size import model_size
from millpond.engine.offload.open import Opened, open_in_memory
from millpond.engine.offload.plan import ENGINE
from millpond.engine.offload.planner import EXAMPLE
from millpond.engine.request import Request
from millpond.errors import BudgetError, DataError, OptionError
from millpond.models.weights.on_disk import MatrixOnDisk, TokenRows
from millpond.models.weights.sizes import WeightSizes
from millpond.models.weights.skeleton import Skeleton
from millpond.tiers.files import DirectFile
from tests.engine.offload.test_packed_weights import extents, flip, packed
from tests.helpers.hf.families import family
from tests.helpers.tiers.backends import FaultyFile

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

VOCABULARY = 3000
PROMPTS = [[5, 9, 44, 7], list(range(3, 150)), [2999, 71, 72, 73, 74, 75, 76, 77, 78]]
CHOSEN = mp.SamplingParams(max_tokens=8, temperature=0, logprobs=2)
SAME: dict[str, Any] = {"method": "h2o", "budget": 16, "max_step_tokens": 64, "max_running": 8}
#: Family, whether the head is the embedding, and the format of matrices in codes.
CELLS = [
    ("llama", False, None),
    ("llama", True, None),
    ("opt", True, None),
    ("gpt_neox", False, None),
    ("llama", False, "int8"),
    ("llama", True, "int4"),
    ("gpt_neox", False, "int4"),
]


def saved(name: str, tied: bool, folder: Path) -> Path:
    """A model whose embeddings and head are more than all of its layers."""
    place = folder / f"{name}-{tied}"
    if not place.exists():
        size = {"ffn_dim": 64, "word_embed_proj_dim": 64} if name == "opt" else {"intermediate_size": 64}
        shape = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 3, "tie_word_embeddings": tied}
        family(name).make(**size, **shape).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def plan(**more: Any) -> mp.Plan:
    return mp.Plan(**{"weights": {"disk": 1.0}, "slots": 2, "prompt_rows": 64, "ends": "disk", **more})


def answers(llm: mp.LLM) -> list[Any]:
    found = [out.completions[0] for out in llm.generate(PROMPTS, CHOSEN)]
    return [(one.token_ids, one.logprobs) for one in found]


@pytest.mark.covering
@pytest.mark.parametrize(("name", "tied", "weights"), CELLS)
def test_tokens_and_log_probabilities_are_those_in_memory(
    name: str, tied: bool, weights: str | None, root: Path, tmp_path: Path
) -> None:
    folder = saved(name, tied, root)
    with mp.LLM(folder, weights=weights, **SAME) as llm:
        tokens = [one for one, _ in answers(llm)]
    assert len(set(tokens)) == len(PROMPTS), "mixed-up requests would be seen"
    options = {"weights": weights, "memory": "32MiB", **({} if weights is None else {"disk": tmp_path}), **SAME}
    with mp.LLM(folder, plan=plan(ends="host"), **options) as llm:
        expected = answers(llm)
    for shares in ({"disk": 1.0}, {"host": 0.4, "disk": 0.6}, {"host": 1.0}):
        with mp.LLM(folder, plan=plan(weights=shares), **options) as llm:
            assert llm.plan is not None
            found = [answers(llm), answers(llm)]
            assert [one for one, _ in found[0]] == tokens
            assert found == [expected, expected]
            if "disk" in shares and "host" in shares:
                continue
            both = llm.plan.bytes["disk"]["embeddings and head"]
            layers = llm.plan.bytes["host"]["weights"] - model_size(folder, weights).ends_on_disk.held_bytes
            assert layers == (model_size(folder, weights).layer_bytes if "host" in shares else 0)
            assert both > llm.plan.bytes["host"]["slots"]


def test_a_sweep_reads_what_was_predicted_and_each_row_once(root: Path) -> None:
    folder = saved("llama", False, root)
    size, rows = model_size(folder), WeightSizes(Skeleton.of(folder)).ends_on_disk.tokens
    assert size.ends_on_disk.n_tiles > 2
    with mp.LLM(folder, memory="12MiB", plan=plan(), method="full", max_step_tokens=64) as llm:
        streamed = llm.engine._model._streamed
        assert streamed is not None
        assert llm.plan is not None
        llm.generate([[5, 6, 7]], mp.SamplingParams(max_tokens=1))
        before, found = (streamed.bytes_read, streamed.row_bytes_read), []
        steps = 5
        for out in llm.generate([[9, 9, 9, 4]], mp.SamplingParams(max_tokens=steps, temperature=0)):
            found = list(out.completions[0].token_ids)
        looked_up = [9, 4, *found[:-1]]
        assert streamed.row_bytes_read - before[1] == sum(rows.rows(one, one + 1).nbytes for one in looked_up)
        swept = streamed.bytes_read - before[0] - (streamed.row_bytes_read - before[1])
        assert swept == steps * (llm.plan.bytes["disk"]["weights"] + size.ends_on_disk.head_bytes)


def test_the_smallest_memory_is_smaller_and_runs(root: Path) -> None:
    folder = saved("llama", False, root)
    asked: dict[str, Any] = {"prompt_tokens": 96, "new_tokens": 32, "method": "full", "machine": EXAMPLE}
    least = {}
    for ends in ("host", "disk"):
        with pytest.raises(BudgetError, match="below the smallest that runs") as refused:
            mp.plan(folder, memory=1000, disk=folder, capabilities=replace(ENGINE, ends=(ends,)), **asked)
        least[ends] = int(str(refused.value).split("runs, ")[1].split(" ")[0].replace(",", ""))
        assert ("which are read from the disk" in str(refused.value)) == (ends == "disk")
    size = model_size(folder)
    saves = size.end_bytes - size.ends_on_disk.held_bytes - size.ends_on_disk.row_room_bytes
    assert least["host"] - least["disk"] >= saves > 2 * VOCABULARY * 64 * 4 - (1 << 16)
    limits = {"max_step_tokens": 16, "max_running": 2}
    with pytest.raises(BudgetError, match=f"{least['disk']:,} bytes for one sequence"):
        mp.LLM(folder, memory=least["disk"] - 1, **limits, **asked)
    with mp.LLM(folder, memory=least["disk"], **limits, **asked) as llm:
        assert llm.plan is not None
        assert llm.plan.plan.ends == "disk"
        prediction = llm.plan.plan.prediction
        assert prediction is not None
        counted, predicted = llm.plan.bytes["host"], prediction.bytes["host"]
        assert counted["slots"] == predicted["slots"]
        assert counted["weights"] == predicted["embeddings and head"]
        assert llm.plan.bytes["disk"] == prediction.bytes["disk"]
        assert sum(counted.values()) <= least["disk"]
        assert "embeddings and head read from the disk" in str(llm.plan)
        found = llm.generate([PROMPTS[0]], CHOSEN)[0].completions[0].token_ids
    with mp.LLM(folder, method="full", max_step_tokens=16) as llm:
        assert found == llm.generate([PROMPTS[0]], CHOSEN)[0].completions[0].token_ids


def test_more_memory_holds_them(root: Path) -> None:
    asked: dict[str, Any] = {"prompt_tokens": 96, "new_tokens": 32, "method": "full", "machine": EXAMPLE}
    folder = saved("llama", False, root)
    assert mp.plan(folder, memory="6MiB", disk=folder, **asked).ends == "host"


def test_a_damaged_head_is_found_before_it_is_used(root: Path, tmp_path: Path) -> None:
    folder = saved("llama", False, root)
    options: dict[str, Any] = {"weights": "int4", "disk": tmp_path, "plan": plan(), **SAME}
    mp.LLM(folder, **options).close()
    path = packed(tmp_path)
    offset, nbytes = extents(path)[0]
    for place in (0, nbytes // 2, nbytes - 1):
        flip(path, offset + place)
        with pytest.raises(
            DataError, match=rf"weights at offset {offset:,}: {nbytes:,} bytes have the checksum.*remov"
        ):
            mp.LLM(folder, **options)
        flip(path, offset + place)
    mp.LLM(folder, **options).close()
    with pytest.raises(OptionError, match="verify='always' compares whole parts"):
        mp.LLM(folder, verify="always", **options)


@pytest.fixture
def faulty(root: Path) -> Any:
    FaultyFile.fault, FaultyFile.times = None, 0
    config = EngineConfig(**SAME)
    yield open_in_memory(saved("llama", False, root), "12MiB", plan(), None, config, open_file=FaultyFile)
    FaultyFile.fault = FaultyFile.thread = None


def test_a_row_that_cannot_be_read_ends_its_step_alone(faulty: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(faulty.model, None, faulty.config, streamed=faulty.streamed)

    def run() -> list[Any]:
        for n, prompt in enumerate(PROMPTS):
            engine.add(Request(request_id=str(n), prompt=tuple(prompt), params=CHOSEN))
        found = {output.request_id: output for output in engine.drain()}
        return [found[str(n)].error or found[str(n)].completions[0].token_ids for n in range(len(PROMPTS))]

    expected = run()
    read = TokenRows._read

    def failing(times: int) -> None:
        """Reads of the thread that looks rows up fail so often, from the next row on."""
        FaultyFile.times = 0

        def begin(self: TokenRows, row: int) -> Any:
            monkeypatch.setattr(TokenRows, "_read", read)
            FaultyFile.fault, FaultyFile.times = OSError(errno.EIO, "Input/output error"), times
            FaultyFile.thread = threading.get_ident()  # threads that read layers ahead would take some of them
            return read(self, row)

        monkeypatch.setattr(TokenRows, "_read", begin)

    failing(1)
    assert run() == expected
    failing(4)  # both tries in the shared pass, and both in the pass of one request alone
    errors = [one for one in run() if isinstance(one, Exception)]
    assert len(errors) == 1
    assert all(isinstance(one, DataError) and "bytes wanted" in str(one) for one in errors)
    FaultyFile.times = 0
    assert run() == expected
    engine.check_integrity()
    engine.close()


@pytest.mark.parametrize("n_rows", [1, 63, 64, 1000])
@pytest.mark.parametrize("room", [24 << 10, 40 << 10, 1 << 20])
@pytest.mark.parametrize("bits", [None, 4])
def test_tiles_hold_every_row_once_and_fit(n_rows: int, room: int, bits: int | None) -> None:
    spans = ((4096 * 3 + 60, 256),) if bits is None else ((4096, 32), (4096 * 50, 8))
    matrix = MatrixOnDisk(Path("x"), n_rows, 64, spans, torch.float32, bits)
    tiles = matrix.tiles(room)
    assert [tile.begin for tile in tiles] == [0, *(tile.end for tile in tiles[:-1])]
    assert tiles[-1].end == n_rows
    assert all(tile.nbytes <= room for tile in tiles)
    for tile in tiles:
        for run, (place, n), (offset, row) in zip(tile.runs, tile.places, spans, strict=True):
            assert run.offset + place - run.place == offset + tile.begin * row
            assert run.offset % 4096 == run.nbytes % 4096 == run.place % 4096 == 0
            assert place + n <= run.place + run.needed <= run.place + run.nbytes
            assert n == (tile.end - tile.begin) * row


def test_rows_are_those_of_the_matrix(root: Path) -> None:
    folder = saved("llama", False, root)
    matrix = WeightSizes(Skeleton.of(folder)).ends_on_disk.tokens
    file, read = DirectFile(matrix.path), list[int]()
    rows = TokenRows(matrix, file, read.append)
    ids = torch.tensor([7, 2999, 0, 7, 7])
    whole = mp.load_model(folder).get_input_embeddings().weight
    assert torch.equal(rows.take(ids), whole[ids])
    assert len(read) == 3
    assert len(rows) == VOCABULARY
    file.close()


def test_an_unknown_place_is_refused() -> None:
    with pytest.raises(OptionError, match="unknown place of the ends 'dsik'; did you mean 'disk'"):
        mp.Plan(ends="dsik")  # type: ignore[arg-type]
