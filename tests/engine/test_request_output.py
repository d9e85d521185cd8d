"""Both places that build a `RequestOutput` fill each of its fields."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import pytest

from millpond.cluster import cluster_request
from millpond.engine import request_state
from millpond.engine.outputs import RequestOutput


@pytest.mark.parametrize("module", [request_state, cluster_request])
def test_every_field_is_named_where_outputs_are_built(module: object) -> None:
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))  # type: ignore[attr-defined]
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "RequestOutput"
    ]
    assert calls
    for call in calls:
        assert not call.args, "by name, so that a new field cannot shift the others"
        assert {keyword.arg for keyword in call.keywords} == {field.name for field in fields(RequestOutput)}
