"""Rows and records made by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from millpond_lab.evals.decoding.record import Record, SummaryRow
from millpond_lab.evals.harness.summary import cell_of


def row(method: str, task: str, score: float, budget: str = "20%", **other: Any) -> SummaryRow:
    """One row of a run on a model "m"; a full cache holds 1,000 bytes."""
    full = method == "full"
    known: dict[str, Any] = {
        "model": "m",
        "method": method,
        "budget": "" if full else budget,
        "codec": "auto",
        "task": task,
        "protocol": "aware",
        "seed": 7,
        "peer": "millpond",
        "score": score,
        "low": score - 0.02,
        "high": score + 0.02,
        "better": "higher",
        "n": 200,
        "failures": 0,
        "kv_bytes": 1000.0 if full else 200.0,
        "full_kv_bytes": 1000.0,
        "kept_share": 1.0 if full else 0.2,
    }
    return SummaryRow(**{**known, **other})


def record(of: SummaryRow, depth: float, length: int, score: float) -> Record:
    """One answered question about a needle."""
    return Record(
        cell_of(of).key,
        f"{depth}-{length}-{score}",
        0,
        "",
        score,
        1.0,
        length,
        0.2,
        200,
        1000,
        facts={"depth": depth, "length": length},
    )


def save(
    folder: Path, rows: Sequence[SummaryRow], records: Sequence[Record] = (), notes: Sequence[dict[str, str]] = ()
) -> Path:
    """A run's folder as the harness leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    data = [{k: None if v != v else v for k, v in asdict(r).items()} for r in rows]
    (folder / "summary.json").write_text(json.dumps(data), encoding="utf-8")
    if records:
        (folder / "samples.jsonl").write_text("".join(json.dumps(asdict(r)) + "\n" for r in records), encoding="utf-8")
    if notes:
        (folder / "run.json").write_text(json.dumps({"runs": list(notes)}), encoding="utf-8")
    return folder
