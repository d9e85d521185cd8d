"""Models of the families that are offloaded, saved once per test file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.test_offload import FAMILIES, model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name in FAMILIES:
        model(name).save_pretrained(root / name)
    return {path.name: path for path in root.iterdir()}
