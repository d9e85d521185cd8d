"""Sparse values on the host: all keys are scored, and the values of the entries with the most attention read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from millpond.cache.attention.sparse_values import SparseValues
from millpond.cache.entries.read_write import append
from millpond.cache.pages.page_table import PageTable
from millpond.cache.pages.pool import PagePool
from millpond.engine.offload.plan import Plan, load_plan, save_plan
from millpond.errors import OptionError
from millpond.kernels.args import AttentionShape
from tests.engine.offload.on_tiers import CPU, engine_of, opened, plan_of, simulated
from tests.engine.test_offload import answers, in_memory

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

HALF = {"device": 0.4, "host": 0.6}


def with_values(folder: Path, values: float, **config: Any) -> tuple[list[Any], int]:
    """Return answers, and the bytes of keys and values that steps on the host read sparsely."""
    found = opened(folder, replace(plan_of(HALF), values=values), simulated(), config=config)
    engine = engine_of(found)
    tokens = answers(engine)
    engine.check_integrity()
    engine.close()
    assert found.host_kv is not None
    return tokens, 0 if found.host_kv.sparse is None else found.host_kv.sparse.bytes_read


def test_sparse_values_read_all_keys_and_the_share_of_values(folders: dict[str, Path]) -> None:
    """Bytes are K + p V; with p = 1 the step is the dense one, and with nearly all values the tokens are the same."""
    assert with_values(folders["llama"], 1.0) == (in_memory("llama", "full"), 0)
    tokens, nearly_all = with_values(folders["llama"], 0.9999)
    assert tokens == in_memory("llama", "full")
    tokens, some = with_values(folders["llama"], 0.05)
    keys = nearly_all / 2
    steps = 9 * len(tokens)  # of three layers, four KV heads at most, each share rounded up
    assert 0 <= some - keys * 1.05 <= steps * 3 * 4 * 64 * 4
    assert tokens != in_memory("llama", "full")


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_sparse_values_are_those_of_the_largest_weights(share: float) -> None:
    pool = PagePool(8, 8, torch.float32, CPU, slots=4)
    table, lens = PageTable(pool, 2, 2), [5, 9]
    rng = torch.Generator().manual_seed(0)
    entries = [tuple(torch.randn(2, n, 8, generator=rng) for _ in "kv") for n in lens]
    for sequence, (k, v) in enumerate(entries):
        append(table, sequence, k, v, torch.arange(k.shape[1], dtype=torch.int32))
    q, k, v = (torch.randn(2, h, 8, generator=rng) for h in (4, 2, 2))
    table.make_room(True, 1)
    out, lse = SparseValues(share).step(table, AttentionShape(0.3), q, k, v, torch.tensor(lens, dtype=torch.int32))
    for s, (past_k, past_v) in enumerate(entries):
        keys, values = torch.cat([past_k, k[s][:, None]], 1), torch.cat([past_v, v[s][:, None]], 1)
        logits = q[s].view(2, 2, 8) @ keys.transpose(1, 2) * 0.3
        p = logits.softmax(-1)
        n = -(-round(p.shape[-1] * share * 1000) // 1000)
        for head in range(2):
            kept = p[head].sum(0).argsort(descending=True)[:n]
            expected = p[head][:, kept] @ values[head, kept]
            torch.testing.assert_close(out[s].view(2, 2, 8)[head], expected)
        torch.testing.assert_close(lse[s].view(2, 2), logits.logsumexp(-1))


def test_where_values_cannot_be_sparse(folders: dict[str, Path]) -> None:
    for kv in ({"host": 1.0}, {"device": 0.5, "disk": 0.5}):
        with pytest.raises(OptionError, match="entries in the memory of a device's host"):
            Plan(kv=kv, values=0.1)
    for value in (0, 1.5, True, "all"):
        with pytest.raises(OptionError, match="must be a share above 0 and at most 1"):
            Plan(kv=HALF, values=value)  # type: ignore[arg-type]
    for method, codec in (("h2o", "auto"), ("full", "int4")):
        found = opened(
            folders["llama"], replace(plan_of(HALF), values=0.1), simulated(), method, config={"codec": codec}
        )
        with pytest.raises(OptionError, match="reads some values of plain entries that all stay"):
            engine_of(found)


def test_a_plan_with_sparse_values_is_saved_and_read(tmp_path: Path) -> None:
    for plan in (Plan(kv=HALF, values=0.25), Plan(kv={"device": 0.0, "host": 1.0})):
        save_plan(plan, tmp_path / "plan.json")
        assert load_plan(tmp_path / "plan.json") == plan
        assert ("values" in (tmp_path / "plan.json").read_text()) == (plan.values < 1)
