"""Texts stored in the codec `transform`: close to what was read, exact where they say so, checked bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import millpond as mp
from millpond.codec.transform.crc32c import crc32c
from millpond.codec.transform.exact_tokens import LEAST_QUERIES
from millpond.codec.transform.fit import SideTransform, fit_side
from millpond.codec.transform.transform_file import ModelTransform
from millpond.errors import CacheMismatchError, DataError, OptionError
from millpond.hf import text_storage
from millpond.hf.calibration import transform as calibration
from millpond.hf.calibration.transform import calibrate_transform
from millpond.hf.document import checksum, read_document, restore_document, save_document
from millpond.hf.text_storage import TextStorage
from millpond.models.cache_argument import cache_argument
from tests.helpers.hf.transform import KINDS, ids, tiny, transform_of_tiny

#: KL of the rounding of exact tokens to bfloat16 in a model whose attention adds little (Gemma).
ROUNDING = 1e-5
#: KL at 1.5 bits a number, with the text's own header and with the calibration's numbers.
BOUND, PLAIN_BOUND = 0.002, 0.0015
TEXT, QUESTION = ids(400, 7)[None], ids(24, 8)[None]


def predictions(model: Any, cache: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(QUESTION, **cache_argument(cache)).logits[0]
    return logits.log_softmax(-1)


def kl(full: Tensor, other: Tensor) -> float:
    return float((full.exp() * (full - other)).sum(-1).mean())


def store(
    kind: str,
    path: Path,
    bits: float = 1.5,
    text: Tensor = TEXT,
    chunk: int | None = None,
    fitted: ModelTransform | None = None,
    **how: Any,
) -> tuple[Tensor, list[Any]]:
    """The full cache's predictions and entries."""
    model = tiny(kind)
    with torch.no_grad(), mp.compress(model, "full") as cache:
        storage = TextStorage(cache, f"transform:{bits}", fitted or transform_of_tiny(kind), **how)
        read_document(model, cache, text, chunk)
        save_document(cache, text, path, storage=storage)
        entries = [layer_cache.read(0) for layer_cache in cache.layer_caches]
        return predictions(model, cache), entries


def restored(kind: str, path: Path, fitted: ModelTransform | None = None) -> tuple[Tensor, list[Any]]:
    cache, found = restore_document(tiny(kind), path, calibration=fitted or transform_of_tiny(kind))
    with cache:
        assert cache.get_seq_length() == found.shape[1]
        entries = [layer_cache.read(0) for layer_cache in cache.layer_caches]
        cache.check_integrity()
        return predictions(tiny(kind), cache), entries


@pytest.mark.parametrize("kind", KINDS)
def test_predictions_stay_close_and_closer_with_more_bits(kind: str, tmp_path: Path) -> None:
    """In models with key biases, a sink and massive channels too."""
    found = []
    for bits in (0.5, 1.5, 4.0):
        full, _ = store(kind, tmp_path / "text", bits)
        found.append(kl(full, restored(kind, tmp_path / "text")[0]))
    assert found[2] < 0.3 * found[1] < 0.3 * found[0] or found[0] < ROUNDING
    assert found[1] < BOUND


def test_a_bias_left_in_the_covariance_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Key biases are 20 deviations and more: bits that tell the mean of all tokens are lost."""

    def with_bias(metric: Tensor, mean: Tensor, covariance: Tensor, samples: Tensor, eps: float) -> SideTransform:
        return fit_side(metric, torch.zeros_like(mean), covariance + torch.outer(mean, mean), samples, eps)

    right = transform_of_tiny("biases")
    monkeypatch.setattr(calibration, "fit_side", with_bias)
    planted = calibrate_transform(tiny("biases"), [ids(512, seed) for seed in range(1, 5)], length=512)
    found = []
    for fitted in (right, planted):
        full, _ = store("biases", tmp_path / "text", fitted=fitted, adapt=False)
        found.append(kl(full, restored("biases", tmp_path / "text", fitted)[0]))
    assert found[0] < PLAIN_BOUND < found[1]


@pytest.mark.parametrize("kind", ["gqa", "biases", "sliding"])
def test_sinks_newest_and_most_attended_tokens_are_exact(kind: str, tmp_path: Path) -> None:
    _, before = store(kind, tmp_path / "text")
    _, after = restored(kind, tmp_path / "text")
    stored = load_file(tmp_path / "text")
    for index, (one, other) in enumerate(zip(before, after, strict=True)):
        n = one.keys.shape[1]
        at = stored[f"{index}.exact.at"].long()
        coded = len(stored[f"{index}.pages"]) * 32
        assert coded == (n - 64) // 32 * 32
        assert torch.equal(at[at >= coded], torch.arange(coded, n))
        assert torch.equal(one.positions, other.positions)
        if n == 400:  # of a sliding layer the window alone is held
            assert at[:4].tolist() == [0, 1, 2, 3]
        for name in ("keys", "values"):
            a, b = getattr(one, name)[:, at], getattr(other, name)[:, at]
            assert torch.equal(a.bfloat16().float(), b)
            inside = [t for t in range(coded) if t not in at.tolist()]
            assert not torch.equal(getattr(one, name)[:, inside].bfloat16().float(), getattr(other, name)[:, inside])


def test_exact_tokens_by_unit_do_not_change_when_text_follows(tmp_path: Path) -> None:
    for n in (320, 400):
        store("gqa", tmp_path / str(n), text=TEXT[:, :n], by_unit=True)
    one, two = (load_file(tmp_path / name) for name in ("320", "400"))
    for index in range(2):
        first, second = (t[f"{index}.exact.at"][t[f"{index}.exact.at"] < 256].tolist() for t in (one, two))
        assert first == second
        assert len(first) > 4


def test_a_long_text_is_judged_by_few_queries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here 8 at most: every 64th token: what they attend to most, as by all of their attention in torch."""
    monkeypatch.setattr(text_storage, "MOST_QUERIES", 8)
    seen: dict[int, Tensor] = {}

    def sample(number: int, q: Tensor, k: Tensor, v: Tensor, mask: Any, shape: Any) -> None:
        at = torch.arange(63, 400, 64)
        assert len(at) <= 8
        weights = (q[0].view(len(k[0]), -1, *q.shape[2:])[:, :, at] @ k[0, :, None].transpose(2, 3) * shape.scale).cpu()
        behind = at[:, None] - torch.arange(400)
        weights = weights.masked_fill(behind < 0, -torch.inf).softmax(-1).masked_fill(behind < 1, 0)
        attention = (weights.mean(1).sum(1) / (behind > 0).sum(0).clamp(min=LEAST_QUERIES)).max(0).values
        attention[:4] = 0
        seen[number] = attention[:320].topk(3).indices.sort().values

    store("gqa", tmp_path / "text")
    with torch.no_grad(), mp.compress(tiny("gqa"), "full") as cache:
        cache.watch(sample)
        read_document(tiny("gqa"), cache, TEXT, None)
    stored = load_file(tmp_path / "text")
    for index in range(2):
        at = stored[f"{index}.exact.at"].long()
        assert at[4:-80].tolist() == seen[index].tolist()


def test_a_text_in_chunks_has_the_same_exact_tokens(tmp_path: Path) -> None:
    for name, chunk in (("one", None), ("two", 72)):
        store("gqa", tmp_path / name, chunk=chunk)
    one, two = (load_file(tmp_path / name) for name in ("one", "two"))
    for index in range(2):
        assert torch.equal(one[f"{index}.exact.at"], two[f"{index}.exact.at"])


def test_bytes_of_a_file(tmp_path: Path) -> None:
    """1.5 bits a number in pages of fixed size, and 4.5 bytes a dimension of the header."""
    store("gqa", tmp_path / "text")
    stored = load_file(tmp_path / "text")
    pages = [stored[f"{index}.pages"] for index in range(2)]
    assert [len(part) for part in pages] == [10, 10]
    assert sum(part.shape[1] - 16 for part in pages) == 32 * 1.5 * 2 * 32 / 8
    rows = transform_of_tiny("gqa").layers[0][0].n_rows
    assert stored["0.key_header"].numel() == 4 * rows + (rows + 1) // 2


def test_a_short_text_is_stored_whole(tmp_path: Path) -> None:
    text = ids(70, 3)[None]
    full, before = store("gqa", tmp_path / "text", text=text)
    found, after = restored("gqa", tmp_path / "text")
    assert kl(full, found) < 1e-4
    assert torch.equal(before[0].keys.bfloat16().float(), after[0].keys)


def test_the_header_of_the_text_helps(tmp_path: Path) -> None:
    text = torch.full((1, 300), 7)  # of words that the calibration has seldom seen
    text[0, ::3] = ids(100, 20)
    found = []
    for adapt in (True, False):
        full, _ = store("gqa", tmp_path / "text", text=text, adapt=adapt)
        found.append(kl(full, restored("gqa", tmp_path / "text")[0]))
    assert found[0] < found[1]


def spoil(path: Path, change: Any, again: bool = True) -> None:
    """Change tensors of a document; `again`: with a checksum of the file that fits."""
    with safe_open(path, "pt") as file:
        facts = dict(file.metadata())
    tensors = load_file(path)
    change(tensors)
    if again:
        facts["checksum"] = checksum({name: fact for name, fact in facts.items() if name != "checksum"}, tensors)
    save_file(tensors, path, facts)


def flip(tensors: dict[str, Tensor]) -> None:
    tensors["1.pages"][3, 17] ^= 4


def other_place(tensors: dict[str, Tensor]) -> None:
    tensors["1.pages"][3], tensors["1.pages"][4] = tensors["1.pages"][4].clone(), tensors["1.pages"][3].clone()


def more_pages(tensors: dict[str, Tensor]) -> None:
    tensors["0.pages"] = tensors["0.pages"].repeat(2, 1)


def more_bits(tensors: dict[str, Tensor]) -> None:
    tensors["0.key_header"][-1] = 0x77


def no_exact(tensors: dict[str, Tensor]) -> None:
    tensors["0.exact.at"] = tensors["0.exact.at"][:-1].clone()


def twice(tensors: dict[str, Tensor]) -> None:
    tensors["0.exact.at"][1] = tensors["0.exact.at"][0]


def missing(tensors: dict[str, Tensor]) -> None:
    del tensors["1.value_header"]


def longer(tensors: dict[str, Tensor]) -> None:
    tensors["0.span"] = torch.tensor([0, 1 << 40])


def narrow(tensors: dict[str, Tensor]) -> None:
    tensors["0.exact.keys"] = tensors["0.exact.keys"][:1].clone()


@pytest.mark.parametrize("change", [flip, other_place, more_pages, more_bits, no_exact, twice, missing, longer, narrow])
def test_damaged_files_are_refused(change: Any, tmp_path: Path) -> None:
    store("gqa", tmp_path / "text")
    spoil(tmp_path / "text", change)
    with pytest.raises(DataError):
        restored("gqa", tmp_path / "text")


def test_one_flipped_bit_is_found(tmp_path: Path) -> None:
    store("gqa", tmp_path / "text")
    spoil(tmp_path / "text", flip, again=False)
    with pytest.raises(DataError, match="checksum differs"):
        restored("gqa", tmp_path / "text")
    spoil(tmp_path / "text", lambda tensors: None)
    with pytest.raises(DataError, match="layer 1: page 3 is damaged"):
        restored("gqa", tmp_path / "text")


def test_pages_of_another_text_are_refused(tmp_path: Path) -> None:
    store("gqa", tmp_path / "text")
    store("gqa", tmp_path / "other", text=ids(400, 9)[None])
    other = load_file(tmp_path / "other")

    def swap(tensors: dict[str, Tensor]) -> None:
        tensors |= {name: t for name, t in other.items() if name != "ids"}

    spoil(tmp_path / "text", swap)
    with pytest.raises(DataError, match="belongs to another text"):
        restored("gqa", tmp_path / "text")


def test_transforms_of_others(tmp_path: Path) -> None:
    store("gqa", tmp_path / "text")
    model = tiny("gqa")
    with pytest.raises(OptionError, match=r"millpond calibrate --codec transform.*minutes"):
        restore_document(model, tmp_path / "text")
    with pytest.raises(CacheMismatchError, match="another class"):
        restore_document(model, tmp_path / "text", calibration=transform_of_tiny("biases"))
    with pytest.raises(CacheMismatchError, match="another shape of layers"):
        restore_document(model, tmp_path / "text", calibration=transform_of_tiny("mqa"))
    with pytest.raises(CacheMismatchError, match="another rotary embedding"):
        restore_document(model, tmp_path / "text", calibration=transform_of_tiny("yarn"))
    texts = [ids(512, seed) for seed in (11, 12)]
    with pytest.raises(CacheMismatchError, match="not the one that the text was stored with"):
        restore_document(model, tmp_path / "text", calibration=calibrate_transform(model, texts, length=512))
    with torch.no_grad(), mp.compress(model, "full") as cache:
        read_document(model, cache, TEXT)
        save_document(cache, TEXT, tmp_path / "plain")
    with pytest.raises(OptionError, match="without a storage codec"):
        restore_document(model, tmp_path / "plain", calibration=transform_of_tiny("gqa"))


def test_caches_that_are_not_coded(tmp_path: Path) -> None:
    model, transform = tiny("gqa"), transform_of_tiny("gqa")
    with mp.compress(model, "full", codec="f16") as cache:
        TextStorage(cache, "transform:1.5", transform)
    with mp.compress(model, "full") as cache, torch.no_grad():
        with pytest.raises(OptionError, match="bits a number"):
            TextStorage(cache, "transform:9", transform)
        read_document(model, cache, TEXT[:, :40])
        with pytest.raises(CacheMismatchError, match="set it before"):
            TextStorage(cache, "transform:1.5", transform)
        cache.reset()
        storage = TextStorage(cache, "transform:1.5", transform)
        read_document(model, cache, TEXT)
        cache.watch(None)
        model(QUESTION, **cache_argument(cache))
        with pytest.raises(CacheMismatchError, match="not seen all queries"):
            save_document(cache, torch.cat([TEXT, QUESTION], 1), tmp_path / "text", storage=storage)


def test_files_are_the_same_again(tmp_path: Path) -> None:
    """Codes are the truth: they can be compared by their hash."""
    digests = set()
    for _ in range(2):
        store("gqa", tmp_path / "text")
        with safe_open(tmp_path / "text", "pt") as file:
            digests.add(file.metadata()["checksum"])
    assert len(digests) == 1


def test_checksums_of_pages_are_those_of_the_file(tmp_path: Path) -> None:
    store("gqa", tmp_path / "text")
    page = load_file(tmp_path / "text")["0.pages"][:1].numpy()
    body = page[:, list(range(12)) + list(range(16, page.shape[1]))]
    assert int(crc32c(body)[0]) == int.from_bytes(page[0, 12:16].tobytes(), "little")
