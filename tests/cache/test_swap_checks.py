"""What a swap file gives back is what was written, or an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from millpond.cache.swap import SwapFiles
from millpond.errors import DataError

CONTENT = [
    [(torch.arange(24).view(2, 12).bfloat16(), torch.arange(6).int())],
    [(torch.randn(2, 12).bfloat16(), torch.empty(0))],
]
Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]
CHANGES: dict[str, Change] = {
    "swapped": lambda t: t | {"0.0.0": t["1.0.0"], "1.0.0": t["0.0.0"]},
    "shape": lambda t: t | {"0.0.0": t["0.0.0"].view(12, 2)},
    "dtype": lambda t: t | {"0.0.0": t["0.0.0"].half()},
    "missing": lambda t: {name: one for name, one in t.items() if name != "0.0.1"},
    "more": lambda t: t | {"2.0.0": torch.zeros(4)},
    "number": lambda t: t | {"0.0.1": t["0.0.1"] + 1},
}


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    files = SwapFiles(tmp_path)
    for wanted, found in zip(CONTENT, files.write(CONTENT).read(), strict=True):
        for a, b in zip(wanted[0], found[0], strict=True):
            assert torch.equal(a, b)
    files.close()


@pytest.mark.parametrize("change", CHANGES)
def test_other_tensors_are_told(change: str, tmp_path: Path) -> None:
    files = SwapFiles(tmp_path)
    written = files.write(CONTENT)
    path = next(files.folder.iterdir())
    save_file(CHANGES[change](load_file(path)), path)
    with pytest.raises(DataError, match="cannot be read"):
        written.read()
    files.close()


def test_every_flipped_byte_is_told(tmp_path: Path) -> None:
    files = SwapFiles(tmp_path)
    written = files.write(CONTENT)
    path = next(files.folder.iterdir())
    whole = path.read_bytes()
    data = len(whole) - sum(t.nbytes for parts in CONTENT for arrays in parts for t in arrays)
    for at in range(data, len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        with pytest.raises(DataError):
            written.read()
    files.close()
