"""Files that are cut, changed or foreign are read as missing, and never answered from."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from millpond.engine.engine import Engine
from millpond.engine.sessions.folder import SessionFolder
from millpond.engine.sessions.stored_turn import StoredTurn, TurnPlace
from millpond.engine.transfer.container import pack
from millpond.errors import CacheMismatchError, MillpondError
from tests.helpers.engine.sessions import NEW, ask, kv, model, open_engine, said, stored, words

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

PLACE = TurnPlace("a" * 32, "b" * 32, 3, "c" * 32)
IDS = np.array([5, 6, 7])


def turn() -> StoredTurn:
    return StoredTurn(IDS, {"0.keys": torch.arange(12.0).view(3, 4), "0.lens": torch.tensor([3], dtype=torch.int32)})


def test_a_turn_comes_back_as_it_was() -> None:
    found = StoredTurn.from_bytes(turn().to_bytes(PLACE), PLACE, IDS)
    assert found.exact
    assert found.ids.tolist() == [5, 6, 7]
    assert found.tensors.keys() == turn().tensors.keys()
    assert all(torch.equal(t, turn().tensors[name]) for name, t in found.tensors.items())


def test_every_byte_counts() -> None:
    data = turn().to_bytes(PLACE)
    for place in range(len(data)):
        for value in {data[place] ^ 1, data[place] ^ 0xFF, 0x09, 0x20} - {data[place]}:
            changed = bytearray(data)
            changed[place] = value
            with pytest.raises(MillpondError):
                StoredTurn.from_bytes(bytes(changed), PLACE, IDS)


def test_every_cut_counts() -> None:
    data = turn().to_bytes(PLACE)
    for length in range(len(data)):
        with pytest.raises(MillpondError):
            StoredTurn.from_bytes(data[:length], PLACE, IDS)
    with pytest.raises(MillpondError):
        StoredTurn.from_bytes(data + b"\0", PLACE, IDS)


@pytest.mark.parametrize("field", ["salt", "scope", "key"])
def test_a_file_at_another_place_is_foreign(field: str) -> None:
    data = turn().to_bytes(PLACE)
    with pytest.raises(CacheMismatchError):
        StoredTurn.from_bytes(data, PLACE._replace(**{field: "d" * 32}), IDS)


def test_a_file_of_another_text_is_foreign() -> None:
    with pytest.raises(CacheMismatchError, match="another text"):
        StoredTurn.from_bytes(turn().to_bytes(PLACE), PLACE, np.array([5, 6, 8]))


# ------------------------------------------------------------------ in an engine


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    engine = open_engine(None)
    yield engine
    engine.close()


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[tuple[Engine, list[int], Path]]:
    """An engine that has stored a turn, the next prompt, and the file."""
    engine = open_engine(tmp_path)
    ids = words(60, 0)
    ids += said(ask(engine, ids)) + words(9, 1)
    (file,) = stored(tmp_path)
    yield engine, ids, file
    engine.close()


def check_missed(engine: Engine, ids: list[int], plain: Engine, torn: int = 1) -> None:
    """The request reads its prompt, and the next one goes on from its turn."""
    output = ask(engine, ids)
    assert kv(output).restored_tokens == 0
    assert said(output) == said(ask(plain, ids))
    stats = engine.stats().sessions
    assert stats is not None
    assert stats.torn == torn
    later = ids + said(output) + words(3, 2)
    assert kv(ask(engine, later)).restored_tokens == len(ids) + NEW - 1


def test_changed_bytes_and_cuts_are_misses(begun: tuple[Engine, list[int], Path], plain: Engine) -> None:
    engine, ids, file = begun
    data, draw = file.read_bytes(), random.Random(0)
    for turn in range(6):
        changed = bytearray(data)
        changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        file.write_bytes(changed if turn % 2 else data[: draw.randrange(len(data))])
        assert kv(ask(engine, ids)).restored_tokens == 0
        assert not file.exists(), "it is removed"
    file.write_bytes(data)
    assert kv(ask(engine, [*ids, 5])).restored_tokens > 0, "as it was it is taken"
    file.write_bytes(b"")
    check_missed(engine, [*ids[:-1], 3], plain, torn=7)


def test_a_whole_file_with_a_cache_of_another_shape_is_a_miss(
    begun: tuple[Engine, list[int], Path], plain: Engine
) -> None:
    """What the checksum cannot see: it was written so."""
    engine, ids, file = begun
    place = TurnPlace.of(file)
    assert place is not None
    found = StoredTurn.from_bytes(file.read_bytes(), place, np.array(ids[: place.length]))
    bad: dict[str, Any] = {
        "fewer heads": {"0.lens": found.tensors["0.lens"][:1]},
        "lengths below 0": {"0.lens": -found.tensors["0.lens"]},
        "another dtype": {"0.keys": found.tensors["0.keys"].half()},
        "no positions": {"0.positions": torch.zeros(0)},
        "capacities of text": {"0.capacities": torch.full((2,), -5)},
    }
    for what, change in bad.items():
        file.write_bytes(StoredTurn(found.ids, {**found.tensors, **change}).to_bytes(place))
        assert kv(ask(engine, ids)).restored_tokens == 0, what
        assert not file.exists()
    file.write_bytes(pack({"format": "millpond-session-1", "place": "elsewhere"}, {}))
    check_missed(engine, ids[:-1], plain, torn=len(bad) + 1)


def test_another_key_with_the_same_length_in_its_name_is_not_looked_at(begun: tuple[Engine, list[int], Path]) -> None:
    engine, ids, file = begun
    file.rename(file.with_name(f"{len(ids) - 2}-{'0' * 32}.safetensors"))
    output = ask(engine, ids)
    assert kv(output).restored_tokens == 0


def lora(seed: int) -> Any:
    """The model with an adapter: the same names and shapes, other numbers far behind the first ones."""
    made = copy.deepcopy(model())
    torch.manual_seed(seed)
    with torch.no_grad():
        made.model.layers[1].self_attn.v_proj.weight[-1] += torch.randn(64)
    return made


def test_another_adapter_of_the_same_name_is_a_miss(tmp_path: Path) -> None:
    first = Engine(lora(1), method="full", cache_dir=tmp_path)
    ids = words(60, 0)
    ids += said(ask(first, ids)) + words(5, 1)
    first.close()
    for seed, restored in ((2, 0), (1, 60 + NEW - 1)):
        engine = Engine(lora(seed), method="full", cache_dir=tmp_path)
        assert kv(ask(engine, ids)).restored_tokens == restored
        engine.close()


def test_a_model_with_other_positions_is_a_miss(tmp_path: Path) -> None:
    """No weight differs, and keys do."""
    ids = words(60, 0)
    for theta in (10_000.0, 20_000.0):
        made = copy.deepcopy(model())
        made.config.rope_parameters = {"rope_type": "default", "rope_theta": theta}
        engine = Engine(made, method="full", cache_dir=tmp_path)
        assert kv(ask(engine, ids)).restored_tokens == 0
        ids = [*ids, *words(70, 5)]
        engine.close()


def test_the_secret_of_another_folder_finds_nothing(tmp_path: Path) -> None:
    engine = open_engine(tmp_path)
    ids = words(40, 0)
    ids += said(ask(engine, ids)) + words(5, 1)
    engine.close()
    (tmp_path / "secret").write_bytes(b"torn")
    assert len(SessionFolder(tmp_path, 1 << 20).secret) == 32, "made again"
    again = open_engine(tmp_path)
    assert kv(ask(again, ids)).restored_tokens == 0
    again.close()
