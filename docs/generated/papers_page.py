"""The page of the papers: where each one is implemented, tested and measured."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from generated.claims.settings import by_masks
from generated.claims.table import INTRODUCTION as CLAIMS_INTRO
from generated.claims.table import claims_table
from generated.markup import left
from generated.method_pages import own_methods
from generated.results import ROOT
from millpond.codec.presets import FLEXGEN, KIVI, KVQUANT, MIKV, PRESETS, QUAROT, THINK
from millpond.methods import METHODS
from millpond.registry import Entry
from millpond_lab.bench.common.report import markdown_table
from millpond_lab.evals.decoding.record import SummaryRow
from millpond_lab.evals.report.curves import CurvePanel
from millpond_lab.evals.task import TASKS

BUDGET = "20%"
#: Test files whose name is not that of the method.
TESTS = {
    "no_heavy": "tests/papers/test_h2o_ablations.py",
    "strided": "tests/papers/test_h2o_ablations.py",
    "fixed": "tests/papers/test_h2o_ablations.py",
}
#: Papers of number formats, as `Codec.paper` has them: the name there, the module, the test, and what departs.
FORMATS = {
    FLEXGEN: (
        "FlexGen",
        "src/millpond/codec/groups.py",
        "tests/codec/test_groups.py",
        "Keys are stored less the mean of their page, so that models with biases on keys hold; `flexgen4_paper` is the "
        "paper's.",
    ),
    KIVI: (
        "KIVI",
        "src/millpond/codec/groups.py",
        "tests/codec/test_quantize.py",
        "Groups of 32 in pages of 64, and the newest entries, 128 to 191 of them, in 16 bits.",
    ),
    KVQUANT: (
        "KVQuant",
        "src/millpond/codec/nuq.py",
        "tests/hf/test_kvquant.py",
        "Ranges of values are those of a head, and outliers of a page of a head, so that heads may hold different "
        "tokens; with `_paper` behind the name they are taken of a token over all heads. Code tables weigh a squared "
        "gradient by the squared range, which the published code does not (`--no-range`).",
    ),
    MIKV: (
        "MiKV",
        "src/millpond/codec/channels.py",
        "tests/codec/test_tiers.py",
        "Which entries are stored in few bits is what any method here would evict, and with `h2o` as in the paper.",
    ),
    QUAROT: (
        "QuaRot",
        "src/millpond/codec/rotate.py",
        "tests/codec/test_transforms.py",
        "Only caches are rotated, not weights and activations; keys are stored less the mean of their page, in "
        "`rotated4_paper` and its like as they are.",
    ),
    THINK: (
        "ThinK",
        "src/millpond/codec/channels.py",
        "tests/codec/test_transforms.py",
        "Channels are chosen once, at the end of the prompt, of a KV head, whose query heads are averaged, and what is "
        "kept is a multiple of 16 (`think` drops 16 of 64 channels, the paper 25).",
    ),
}
#: Formats whose upper tier is what a method keeps.
TIERED = {name for name, codec in PRESETS.items() if codec.tiered}
METHODS_INTRO = f"""\
Measured: the score of `pond-recall` at a budget of {BUDGET}, as a share of the full cache's score (95 % interval).
With the question known, context and question are compressed together; otherwise the context is compressed first.
Tasks, samples and other budgets are on the page of each method.
"""
FORMATS_INTRO = """\
Measured: perplexity of `pond-text` over the full cache in this format, against the full cache in bf16
([rows](../../benchmarks/results/codecs-text/summary.md),
[more](../../benchmarks/results/codecs-text-papers/summary.md), [conditions](../how-to/codecs.md)); of MiKV's with
`h2o` at 20 % for the upper tier.
On SmolLM2, whose heads are wider, ThinK's, KVQuant's and MiKV's were measured
[on three texts](../how-to/codecs.md#formats-of-papers-on-a-real-model).
"""
SERVING_INTRO = """\
Measured: the row that is kept, and what of the paper is not built or differs.
"""
#: Paper and link, modules, tests, rows, and what departs.
SERVING = (
    (
        "BatchLLM (Zheng et al., MLSys 2026, arXiv:2412.03594)",
        ("src/millpond/engine/batch_plan.py", "src/millpond/engine/shared_prefixes.py"),
        ("tests/engine/batch/test_plan.py", "tests/engine/batch/test_memory_centric.py"),
        "[batch.md](../../benchmarks/results/batch.md): 82.4 % of the tokens spared, arrival takes 3.0 times as long",
        "Common beginnings on all levels (the paper's single level: `levels=1`). Steps of a batch are filled by memory "
        "where `kv_memory` limits it, and by the plan with KV on a disk, where beginnings are shared too. "
        "Horizontal fusion for decoding steps over plain entries on a CPU (0.94 of the time of two calls, half of the "
        "entries shared); a GPU and codes have a call for each part, and each prompt reads its "
        "beginning itself ([why](../explanation/engine.md#prefix-sharing)).",
    ),
    (
        "ChunkAttention (Ye et al., ACL 2024, arXiv:2402.15220)",
        ("src/millpond/cache/prefix_tree.py", "src/millpond/cache/pages/shared_prefix.py"),
        ("tests/engine/test_live_sharing.py", "tests/engine/test_shared_codes.py"),
        "[kernels.md](../../benchmarks/results/kernels.md): 32 sequences of 2,048 entries, 8 heads of 128, all shared: "
        "1.698 ms, and 11.20 ms each alone",
        "One tree for all layers, with sequences in any order; prompts are matched before they are read, so that "
        "common tokens are computed once. Codes of common beginnings are held once, and read in two phases from "
        "16,384 spared entries of a head on.",
    ),
    (
        "Cache-Craft (Agarwal et al., SIGMOD 2025, arXiv:2502.15734)",
        ("src/millpond/engine/chunks/reuse.py", "src/millpond/policy/reuse.py"),
        ("tests/engine/chunks/test_recompute.py", "tests/engine/chunks/test_choice.py"),
        '[chunk-reuse-smollm2.md](../../benchmarks/results/chunk-reuse-smollm2.md): `"auto"` computes 11.6 % and '
        "leaves .28 [.24, .32] of the divergence of chunks stored alone",
        "Further variants of a chunk take free room only, since those that evict others make it compute more. That "
        "tokens of chunks which the question does not look at end early (`focus`) is an option, off by default. Times "
        "of loading and of computing, by which layers are read ahead, are measured.",
    ),
    (
        "Paging with Succinct Predictions (Antoniadis et al., ICML 2023, arXiv:2210.02775)",
        ("packages/millpond-lab/src/millpond_lab/paging/marker.py", "src/millpond/cache/paging/predictor.py"),
        ("tests/lab/paging/test_mark0.py", "tests/lab/paging/test_replay.py"),
        "[paging.md](../../benchmarks/results/paging.md): `mark0` hits .1738 and LRU .1393 of the accesses with 6,000 "
        "blocks",
        "Blocks follow each other, so `mark0` counts a 0 behind an excess of 1s as 1. Phase bits are those of a replay "
        "or of `train pager --label phase`; without such a file `mark_predict` takes discard bits for them, and "
        "predictors are fitted to Belady's.",
    ),
    (
        "FlexGen (Sheng et al., ICML 2023, arXiv:2303.06865)",
        ("src/millpond/engine/offload/search.py", "packages/millpond-lab/src/millpond_lab/papers/flexgen.py"),
        ("tests/engine/offload/test_kv_on_tiers.py", "tests/lab/papers/test_flexgen.py"),
        "[offload.md](../../benchmarks/results/offload.md): a model of 314 MB in 96 MiB, 16.77 tokens a second with "
        "H2O at 20 %, 9.41 with the full cache, and 2.41 of Accelerate",
        "KV is divided by layers, where the paper divides the sequences of a block; with sparse attention query heads "
        "that share a KV head read the same values; what the linear program plans "
        "between device, host and disk has run on a simulated device and was not timed on a GPU.",
    ),
    (
        "DistServe (Zhong et al., OSDI 2024, arXiv:2401.09670)",
        (
            "packages/millpond-lab/src/millpond_lab/cluster_plan/place.py",
            "packages/millpond-lab/src/millpond_lab/papers/distserve_simulation.py",
        ),
        ("tests/lab/cluster_plan/test_place.py", "tests/cluster/test_replan.py"),
        "[whether-to-split-2.md](../../benchmarks/results/whether-to-split-2.md): simulated, chat with `h2o` at 20 % "
        "and int4, 3.92 requests a second and device together, 2.76 apart",
        "Replanning gives workers the other role, one at a time, by measured seconds; the paper searches again by "
        "simulation. A pipeline is one of processes on a CPU, for batches and for a server, and no worker of a "
        "cluster; layers that several devices share are left to vLLM.",
    ),
)
TASKS_INTRO = """\
Tasks are what methods are measured by, so they have no row of their own; [options](tasks.md).
"""


def papers_page(panels_of: Callable[[str], Mapping[str, CurvePanel]], formats: Sequence[Sequence[SummaryRow]]) -> str:
    """The page in Markdown.

    Args:
        panels_of: curves of a method by protocol. formats: rows of caches in several formats on one text, of each run.
    """
    parts = [f"# Papers\n\n## What papers claim\n\n{CLAIMS_INTRO}", left(claims_table()), by_masks()]
    parts.append(f"## Methods\n\n{METHODS_INTRO}")
    entries = [METHODS.get(name) for name in own_methods()]
    methods = [
        (
            f"[`{e.name}`](methods/{e.name}.md)",
            _paper(e),
            _file(_module(e)),
            _file(_test(e.name)),
            *(_score(panels_of(e.name), protocol) for protocol in ("aware", "agnostic")),
            departure(e),
        )
        for e in entries
        if e.paper
    ]
    parts.append(
        _table(("method", "paper", "module", "test", "question known", "question unknown", "departs"), methods)
    )
    parts.append(f"## Number formats\n\n{FORMATS_INTRO}")
    unknown = {codec.paper for codec in PRESETS.values() if codec.paper} - {*FORMATS}
    if unknown:
        raise ValueError(f"FORMATS in docs/generated/papers_page.py lacks papers of number formats: {sorted(unknown)}")
    codecs = [
        (_names(paper), f"{title}, {_link(paper)}", _file(module), _file(test), _losses(paper, formats), departs)
        for paper, (title, module, test, departs) in FORMATS.items()
    ]
    parts.append(_table(("formats", "paper", "module", "test", "perplexity", "departs"), codecs))
    parts.append(f"## Serving\n\n{SERVING_INTRO}")
    serving = [
        (_cited(paper), *("<br>".join(map(_file, files)) for files in (modules, tests)), measured, departs)
        for paper, modules, tests, measured, departs in SERVING
    ]
    parts.append(_table(("paper", "modules", "tests", "measured", "departs"), serving))
    parts.append(f"## Evaluation tasks\n\n{TASKS_INTRO}")
    tasks = [TASKS.get(name) for name in TASKS.names()]
    rows = [(f"`{e.name}`", _paper(e), _file(_module(e)), _task_test(e)) for e in tasks if e.paper]
    parts.append(_table(("task", "paper", "module", "test"), rows))
    return "\n".join(parts)


def departure(entry: Entry[Any]) -> str:
    """The first sentence of what a method's docstring says of where it leaves its paper; "–" where it says nothing."""
    doc = re.split(r"\n\s*\n", inspect.getdoc(entry.build) or "")
    told = next((" ".join(part.split()) for part in doc if part.startswith("Departs from")), "")
    first, _, _ = told.partition(": ")[2].partition(". ")
    return f"{first.removesuffix('.')}." if first else "–"


def _module(entry: Entry[Any]) -> str:
    module = entry.build.__module__.replace(".", "/")
    return f"packages/millpond-lab/src/{module}.py" if module.startswith("millpond_lab/") else f"src/{module}.py"


def _test(name: str) -> str:
    return TESTS.get(name, f"tests/papers/test_{name}.py")


def _task_test(entry: Entry[Any]) -> str:
    """The first test file of the evaluation that names the task."""
    for file in [
        *sorted((ROOT / "tests" / "lab" / "evals").glob("test_*task*.py")),
        ROOT / "tests/lab/evals/test_ruler_files.py",
    ]:
        if re.search(rf"\b{entry.name}\b", file.read_text(encoding="utf-8")):
            return _file(str(file.relative_to(ROOT)))
    raise ValueError(f"no test in tests/evals names the task {entry.name}")


def _paper(entry: Entry[Any]) -> str:
    """Authors and year as the module's first line says them, and the link."""
    doc = importlib.import_module(entry.build.__module__).__doc__ or ""
    cited = re.search(rf"\(([^()]*), {re.escape(entry.paper)}\)", " ".join(doc.split()))
    return f"{cited[1]}, {_link(entry.paper)}" if cited else _link(entry.paper)


def _cited(paper: str) -> str:
    """A citation that ends with its number, with a link."""
    words, _, number = paper.removesuffix(")").rpartition(" ")
    return f"{words} {_link(number)})"


def _link(paper: str) -> str:
    number = paper.removeprefix("arXiv:")
    return paper if number == paper else f"[{paper}](https://arxiv.org/abs/{number})"


def _file(path: str) -> str:
    """A link to a file of the repository.

    Raises:
        ValueError: there is none.
    """
    if not (ROOT / path).is_file():
        raise ValueError(f"{path} does not exist; name the file in docs/generated/papers_page.py")
    return f"[{Path(path).name}](../../{path})"


def _score(panels: Mapping[str, CurvePanel], protocol: str) -> str:
    points = panels[protocol].own.points if protocol in panels else ()
    point = next((point for point in points if point.budget == BUDGET), None)
    return "–" if point is None else f"{point.share:.1%} ({point.low:.1%} to {point.high:.1%})"


def _codecs(paper: str) -> list[str]:
    return sorted(name for name, codec in PRESETS.items() if codec.paper == paper)


def _names(paper: str) -> str:
    return ", ".join(f"`{name}`" for name in _codecs(paper))


def _losses(paper: str, runs: Sequence[Sequence[SummaryRow]]) -> str:
    found: dict[str, float] = {}
    for rows in runs:
        full = {row.codec: row.score for row in rows if row.method == "full"}
        tiers = {row.codec: row.score for row in rows if row.method == "h2o" and row.codec in TIERED}
        scores = full | tiers
        found |= {name: scores[name] / full["bf16"] - 1 for name in _codecs(paper) if name in scores}
    return ", ".join(f"`{name}` {found[name]:+.1%}" for name in _codecs(paper) if name in found) or "–"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown_table(head, rows).replace("---:", "---")
