"""Blocks of GGUF files that are taken over as codes: no number of them changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from tests.helpers.gguf.files import HEAD, HEADS, write_gguf

from millpond.errors import DataError
from millpond.models.gguf import blocks, converted
from millpond.models.gguf.convert import converted_folder
from millpond.models.weights.packed_file import MemoryPacker, coded_parts
from millpond.models.weights.sizes import WeightSizes
from millpond.models.weights.skeleton import Skeleton
from millpond.tiers.buffers import aligned_buffer

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPOND_CACHE", str(tmp_path / "cache"))


def packed(folder: Path, weights: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Every matrix in codes as numbers, and what it is, by its name in the model."""
    skeleton = Skeleton.of(folder)
    sizes = WeightSizes(skeleton, weights)
    numbers: dict[str, torch.Tensor] = {}
    kinds: dict[str, str] = {}
    with MemoryPacker(sizes) as fill:
        for index, part in enumerate(coded_parts(sizes)):
            data = aligned_buffer(part.nbytes)
            fill(part, data)
            lead = "" if index == 0 else f"model.layers.{index - 1}."
            numbers |= {lead + name: own.widen(torch.float32) for one in part.codes(data) for name, own in one.apart()}
            kinds |= {lead + name: kind for name, kind in part.described().items()}
    return numbers, kinds


def in_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of heads as the model has them: llama.cpp keeps a row of the first half beside that of the second."""
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def expected(matrices: dict[str, np.ndarray], architecture: str) -> dict[str, np.ndarray]:
    """The numbers of a file by the names of the model."""
    names = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    found = {"model.embed_tokens.weight": matrices["token_embd.weight"], "lm_head.weight": matrices["output.weight"]}
    for name, rows in matrices.items():
        if name.startswith("blk."):
            _, layer, inner, _ = name.split(".")
            turned = architecture == "llama" and inner in ("attn_q", "attn_k")
            heads = len(rows) // HEAD
            found[f"model.layers.{layer}.{names[inner]}.weight"] = in_order(rows, heads) if turned else rows
    return found


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("llama", "Q8_0"), ("llama", "Q4_0"), ("llama", "Q4_1"), ("qwen2", "Q4_1"), ("qwen3", "Q8_0")],
)
def test_codes_are_taken_over_without_loss(architecture: str, kind: str, tmp_path: Path) -> None:
    matrices = write_gguf(tmp_path / "tiny.gguf", architecture, kind, tokenizer=False)
    wanted = expected(matrices, architecture)
    for weights in ("int4", "int8"):
        numbers, kinds = packed(converted_folder(tmp_path / "tiny.gguf"), weights)
        assert numbers.keys() == wanted.keys()
        for name, rows in wanted.items():
            assert np.array_equal(numbers[name].numpy(), rows), name
        assert set(kinds.values()) == {f"{8 if kind == 'Q8_0' else 4} bits of {kind}"}


def test_a_file_of_several_types(tmp_path: Path) -> None:
    mixed = {"attn_v": "Q8_0", "output.weight": "Q6_K", "ffn_gate": "Q4_0", "token_embd": "Q6_K"}
    matrices = write_gguf(tmp_path / "tiny.gguf", kind="Q4_1", kinds=mixed, tokenizer=False)
    numbers, kinds = packed(converted_folder(tmp_path / "tiny.gguf"), "int4")
    assert kinds.pop("lm_head.weight") == "8 bits from Q6_K"
    assert set(kinds.values()) == {"8 bits of Q8_0", "4 bits of Q4_0", "4 bits of Q4_1"}
    for name, rows in expected(matrices, "llama").items():
        if name in kinds:
            assert np.array_equal(numbers[name].numpy(), rows), name


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("F16", "4 bits"),
        ("BF16", "4 bits"),
        ("F32", "4 bits"),
        ("Q4_K", "4 bits from Q4_K"),
        ("Q5_0", "8 bits from Q5_0"),
        ("Q5_1", "8 bits from Q5_1"),
        ("Q5_K", "8 bits from Q5_K"),
        ("Q6_K", "8 bits from Q6_K"),
    ],
)
def test_other_types_are_packed_from_wide_numbers(kind: str, said: str, tmp_path: Path) -> None:
    matrices = write_gguf(tmp_path / "tiny.gguf", kind=kind, tokenizer=False)
    numbers, kinds = packed(converted_folder(tmp_path / "tiny.gguf"), "int4")
    assert set(kinds.values()) == {said}
    assert "model.embed_tokens.weight" not in kinds  # it is no matrix that rows are multiplied with
    wanted = expected(matrices, "llama")
    steps = 2 * 127 if said.startswith("8") else 2 * 15
    for name, found in numbers.items():
        rows = wanted[name]
        assert 0 < np.abs(found.numpy() - rows).max() < 2.2 * np.abs(rows).max() / steps, name
    _, eight = packed(converted_folder(tmp_path / "tiny.gguf"), "int8")
    assert {one.split()[0] for one in eight.values()} == ({"4"} if kind == "Q4_K" else {"8"})


@pytest.mark.parametrize("change", ["gone", "other"])
def test_without_the_file_matrices_are_packed_from_the_folder(change: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, kind="Q4_0", tokenizer=False)
    folder = converted_folder(path)
    if change == "gone":
        path.unlink()
    else:
        write_gguf(path, kind="Q4_0", tokenizer=False, seed=1)
    _, kinds = packed(folder, "int4")
    assert set(kinds.values()) == {"4 bits"}


def test_rows_in_another_order_are_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matrices = write_gguf(tmp_path / "tiny.gguf", kind="Q4_1", tokenizer=False)
    folder = converted_folder(tmp_path / "tiny.gguf")
    monkeypatch.setattr(blocks, "_order", lambda n, heads: torch.arange(n).roll(1))
    numbers, kinds = packed(folder, "int4")
    turned = {name for name, kind in kinds.items() if kind == "4 bits from Q4_1"}
    assert turned == {f"model.layers.{n}.self_attn.{one}_proj.weight" for n in (0, 1) for one in "qk"}
    for name, rows in expected(matrices, "llama").items():
        step = 0 if name not in turned else np.abs(rows).max() / 7
        assert np.abs(numbers[name].numpy() - rows).max() <= step, name


def test_a_note_that_is_damaged_counts_as_none(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", kind="Q8_0", tokenizer=False)
    folder = converted_folder(tmp_path / "tiny.gguf")
    assert converted.source_of(folder) == tmp_path / "tiny.gguf"
    for text in ("", "[]", "{}", json.dumps({"path": 3, "size": 1, "modified": 1})):
        (folder / converted.SOURCE).write_text(text)
        assert converted.source_of(folder) is None
    converted_folder(tmp_path / "tiny.gguf")
    assert converted.source_of(folder) == tmp_path / "tiny.gguf"


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_any_block_is_the_numbers_that_the_package_makes_of_it(kind: str) -> None:
    rng = np.random.default_rng(3)
    bits, nbytes = blocks.TAKEN[kind]
    raw = rng.integers(0, 256, (40, 6, nbytes), dtype=np.uint8)
    scales = (rng.standard_normal((40, 6, 2)) * np.exp2(rng.integers(-24, 12, (40, 6, 2)))).astype(np.float16)
    scales[0, 0], scales[1, 1, 0] = 0, 0  # a constant group
    raw[..., :2] = scales[..., :1].view(np.uint8)
    if kind == "Q4_1":
        raw[..., 2:4] = scales[..., 1:].copy().view(np.uint8)
    data = raw.reshape(40, -1)
    found = blocks.GGUFBlocks(kind, bits).codes(torch.from_numpy(data), torch.float32)
    assert found.bits == bits
    assert np.array_equal(found.widen().numpy(), dequantize(data, GGMLQuantizationType[kind]))
    halves = blocks.GGUFBlocks(kind, bits, heads=HEADS).codes(torch.from_numpy(data), torch.float32)
    assert np.array_equal(halves.widen().numpy(), in_order(found.widen().numpy(), HEADS))


@pytest.mark.parametrize(("kind", "scale"), [("Q8_0", np.inf), ("Q4_1", np.nan), ("Q4_0", 6e4)])
def test_scales_that_are_no_numbers_are_found(kind: str, scale: float, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, kind=kind, tokenizer=False)
    folder = converted_folder(path)
    place: Any = next(found for found in Skeleton.of(folder).blocks.values() if "ffn_down" in found.raw.name).raw  # type: ignore[union-attr]
    note = (folder / converted.SOURCE).read_text()
    with path.open("r+b") as file:
        file.seek(place.offset + 5 * place.nbytes // place.shape[0])
        file.write(np.float16(scale).tobytes())
    converted.note_source(folder, path, converted.FileIdentity.of(path), "bf16")
    assert (folder / converted.SOURCE).read_text() != note
    with pytest.raises(DataError, match=r"tiny.gguf: scales of 'blk.0.ffn_down.weight' are not finite"):
        packed(folder, "int4")
