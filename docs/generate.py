"""Write what the documentation takes from code and results: method pages, options, CLI, tables, curves, figures.

Run `python docs/generate.py`, or with --check to compare only: a stale page ends with status 1.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from generated.api_page import api_page
from generated.board_page import NAMES as BOARD_MODELS
from generated.board_page import board, board_summary, in_short, presets
from generated.cli_page import cli_page
from generated.gpu_tables import gpu_section
from generated.gpu_tables import read as read_gpu_rows
from generated.markup import NOTE, by_hand, fill, fill_all, fill_figures
from generated.method_pages import method_page, method_table, own_methods
from generated.option_types import PATH as OPTION_TYPES
from generated.option_types import option_types
from generated.paper_rows import format_figures, format_tables, sparse_values_table
from generated.papers_page import papers_page
from generated.quality_page import quality_figures, quality_tables
from generated.request_fields_page import request_fields_page
from generated.results import RESULTS, ROOT
from generated.results_page import results_page
from generated.retaining_page import retaining_figures, retaining_tables
from generated.settings_page import settings_page
from generated.speed_tables import result_table
from generated.storage_table import storage_eviction, storage_facts, storage_tables
from generated.tasks_page import tasks_page
from generated.text_tables import chat_facts, codec_texts
from generated.vllm_table import vllm_tables

from millpond.install_command import shown_command
from millpond.methods import METHODS
from millpond_lab.bench.model_types import page as model_types
from millpond_lab.evals.decoding.record import SummaryRow
from millpond_lab.evals.harness.store import SUMMARY
from millpond_lab.evals.harness.summary import read_notes, read_rows, unite
from millpond_lab.evals.report import claims_page
from millpond_lab.evals.report.claims import read_findings
from millpond_lab.evals.report.curves import CurvePanel, curves_of, panels
from millpond_lab.evals.report.leaderboard import render
from millpond_lab.evals.report.plots import board as board_plot
from millpond_lab.evals.report.plots.curve import curve_picture, digest, is_current
from millpond_lab.evals.report.plots.style import write
from millpond_lab.markdown import one_per_line

#: Commands that follow from where the package can be installed from, see `millpond.install_command`.
INSTALLS = re.compile(r"pip install '(?:millpond|\.)\[([\w,-]+)\]'")
MODEL_TYPES = RESULTS / "model-types.json"
QUALITY = RESULTS / "quality"
CURVES = ("curves-aware", "curves-agnostic")  # on the pages of the methods, not on the leaderboard
CODECS = RESULTS / "codecs-text"
MORE_CODECS = RESULTS / "codecs-text-papers"
PICTURES = ROOT / "docs" / "images" / "quality"
BOARD_PICTURE = ROOT / "docs" / "images" / "board.svg"
CHOOSE = ROOT / "docs" / "how-to" / "choose-a-method.md"
CODECS_PAGE = ROOT / "docs" / "how-to" / "codecs.md"
OFFLOAD = ROOT / "docs" / "how-to" / "small-memory.md"
VLLM = ROOT / "docs" / "how-to" / "vllm.md"
GPU_ROWS = RESULTS / "gpu-rows.jsonl"
SPEED = ROOT / "docs" / "explanation" / "speed.md"
ORDERINGS = ROOT / "docs" / "explanation" / "orderings.md"
QUALITY_PAGE = ROOT / "docs" / "explanation" / "quality.md"
RETAINING = ROOT / "docs" / "how-to" / "trained-heads.md"
#: Pages whose sentences have figures that are computed, beside those that a mark finds in committed rows.
OWN_FIGURES = {CODECS_PAGE: format_figures, QUALITY_PAGE: quality_figures, RETAINING: retaining_figures}


def pages() -> dict[Path, str]:
    """Every generated text by its path."""
    reference = ROOT / "docs" / "reference"
    rows = curve_rows()
    texts = {
        reference / "methods" / f"{name}.md": method_page(METHODS.get(name), method_panels(name), rows)
        for name in own_methods()
    }
    texts[reference / "tasks.md"] = tasks_page()
    texts[reference / "methods" / "README.md"] = f"{NOTE}# Methods\n\n{method_table('')}"
    texts[reference / "cli.md"] = cli_page()
    texts[reference / "settings.md"] = settings_page()
    texts[reference / "request-fields.md"] = request_fields_page()
    texts[reference / "models.md"] = NOTE + model_types.render(json.loads(MODEL_TYPES.read_text(encoding="utf-8")))
    texts[reference / "api.md"] = NOTE + api_page()
    texts[reference / "papers.md"] = NOTE + papers_page(method_panels, [read_rows(CODECS), read_rows(MORE_CODECS)])
    readme = ROOT / "README.md"
    texts[readme] = fill(readme.read_text(encoding="utf-8"), "board", board_summary())
    texts[ROOT / "docs" / "board.md"] = NOTE + board()
    speed = fill(SPEED.read_text(encoding="utf-8"), "results", result_table())
    texts[SPEED] = fill(speed, "gpu", gpu_section(read_gpu_rows(GPU_ROWS)))
    texts[CODECS_PAGE] = fill_all(
        CODECS_PAGE.read_text(encoding="utf-8"),
        {
            "codec-texts": codec_texts(),
            "codec-papers": format_tables(),
            "storage-codec": storage_tables(),
            "storage-eviction": storage_eviction(),
            "storage-facts": storage_facts(),
        },
    )
    texts[OFFLOAD] = fill(OFFLOAD.read_text(encoding="utf-8"), "sparse-values", sparse_values_table())
    texts[VLLM] = fill_all(VLLM.read_text(encoding="utf-8"), vllm_tables())
    texts[CHOOSE] = fill(CHOOSE.read_text(encoding="utf-8"), "chat-facts", chat_facts())
    orderings = claims_page.tables(read_findings(QUALITY / "orderings.json"))
    texts[ORDERINGS] = fill_all(ORDERINGS.read_text(encoding="utf-8"), orderings)
    texts[QUALITY_PAGE] = fill_all(QUALITY_PAGE.read_text(encoding="utf-8"), quality_tables())
    texts[RETAINING] = fill_all(RETAINING.read_text(encoding="utf-8"), retaining_tables())
    texts[ROOT / "docs" / "leaderboard.md"] = leaderboard_page()  # as `millpond leaderboard` writes it
    for page in by_hand(readme, ROOT / "docs"):
        text = texts.get(page) or page.read_text(encoding="utf-8")
        texts[page] = fill_figures(text, OWN_FIGURES[page]() if page in OWN_FIGURES else {})
    for page in [readme, *sorted((ROOT / "docs").glob("how-to/*.md"))]:
        text = texts.get(page) or page.read_text(encoding="utf-8")
        if INSTALLS.search(text):
            texts[page] = INSTALLS.sub(lambda found: shown_command(found[1]), text)
    texts[RESULTS / "README.md"] = results_page(texts)
    return {path: one_per_line(text) for path, text in texts.items()} | {OPTION_TYPES: option_types()}


def pictures() -> dict[Path, Mapping[str, CurvePanel]]:
    """What every generated picture shows, by its path."""
    shown = {PICTURES / f"{name}.svg": method_panels(name) for name in own_methods()}
    return {path: found for path, found in shown.items() if found}


@cache
def curve_rows() -> list[SummaryRow]:
    """The committed rows that the curves are made of."""
    return [row for name in CURVES if (QUALITY / name / SUMMARY).exists() for row in read_rows(QUALITY / name)]


def method_panels(name: str) -> Mapping[str, CurvePanel]:
    """The curves of a method by protocol."""
    return panels(curves_of(curve_rows()), name)


def leaderboard_page() -> str:
    """The committed results of evaluations."""
    folders = sorted(file.parent for file in QUALITY.glob(f"*/{SUMMARY}") if file.parent.name not in CURVES)
    rows = unite([row for folder in folders for row in read_rows(folder)])
    return render(rows, [note for folder in folders for note in read_notes(folder)])


def main() -> None:
    """Write, or with --check compare."""
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    drawn = {path: shown for path, shown in pictures().items() if not is_current(path, digest(shown))}
    stale += drawn
    answers = in_short(), BOARD_MODELS, presets()
    if stale_board := not is_current(BOARD_PICTURE, board_plot.digest(*answers)):
        stale.append(BOARD_PICTURE)
    names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
    if "--check" in sys.argv[1:]:
        sys.exit(f"stale: {names}; run make docs-pages" if stale else 0)
    for path, text in pages().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for path, shown in drawn.items():
        write(curve_picture(shown), path, about=digest(shown))
    if stale_board:
        write(board_plot.board_picture(*answers), BOARD_PICTURE, about=board_plot.digest(*answers))
    print(f"written: {names}" if stale else "all pages were current")


if __name__ == "__main__":
    main()
