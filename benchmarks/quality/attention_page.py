"""Attention of a real model as tables in a page and as a picture, out of the file of attention_mass.py.

attention_page.py benchmarks/results/attention-mass.json.xz --page docs/explanation/attention-real.md --svg FILE
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes

from millpond.inspector.palette import INK
from millpond_lab.bench.common.report import markdown_table
from millpond_lab.cli.train.heavy_hitters import BEGIN, END
from millpond_lab.evals.report.plots.style import SCALE, calm, figure, title, write

Found = dict[str, Any]


def share(value: float) -> str:
    return f"{100 * value:.1f} %"


def spread(values: np.ndarray) -> str:
    """Mean over layers and heads (least to greatest layer; least to greatest head)."""
    layers = values.mean(1)
    return (
        f"{share(values.mean())} ({100 * layers.min():.0f} to {100 * layers.max():.0f}; "
        f"{100 * values.min():.0f} to {100 * values.max():.0f})"
    )


def fits(ranked: np.ndarray, found: Found) -> tuple[float, list[float]]:
    """Mean slope of log(attention) over log(rank), and mean R squared of a power law, exponential and log-normal."""
    at = np.array(found["ranks"], dtype=float)
    normal = np.array([NormalDist().inv_cdf((rank - 0.5) / found["length"]) for rank in at])
    y = np.log(ranked) - np.log(ranked).mean(-1, keepdims=True)
    slopes, shares = [], []
    for x in (np.log(at), at, normal):
        x = x - x.mean()
        slope = (x * y).sum(-1) / (x * x).sum()
        slopes.append(float(slope.mean()))
        shares.append(float((1 - ((y - slope[..., None] * x) ** 2).sum(-1) / (y**2).sum(-1)).mean()))
    return slopes[0], shares


def tables(found: Found) -> str:
    """The measurements in Markdown, a column per text."""
    texts, even = found["texts"], np.array(found["even"])
    get = {
        name: {key: np.array(value) for key, value in text.items() if key != "words"} for name, text in texts.items()
    }
    named = {
        "first four tokens, share of attention": lambda t: spread(t["sink"]),
        "heaviest 5 % of columns": lambda t: spread(t["curve"][..., 5]),
        "heaviest 20 % of columns": lambda t: spread(t["curve"][..., 20]),
        "the same, 5 %, without the first four": lambda t: spread(t["beyond"][..., 5]),
        "the same, 20 %, without the first four": lambda t: spread(t["beyond"][..., 20]),
        "each query's own heaviest 5 %": lambda t: spread(t["own"][..., 0]),
        "each query's own heaviest 20 %": lambda t: spread(t["own"][..., 1]),
        "entries below 1 % of the row's maximum": lambda t: spread(t["sparsity"]),
        "the same, without the first four": lambda t: spread(t["sparsity_beyond"]),
        "layers with more than 95 % of such entries": lambda t: layers_above(t["sparsity"]),
        "the same, without the first four ": lambda t: layers_above(t["sparsity_beyond"]),
    }
    parts = [
        f"`{found['model']}` (weights {found['weights_sha256'][:12]}), float32, {found['windows']} windows of "
        f"{found['length']:,} tokens per text, {found['hardware']}.\n"
        "Each cell: the mean over all layers and heads (least to greatest layer; least to greatest head).\n"
        f"Even attention would put {share(even[5])} in the heaviest 5 % of columns and {share(even[20])} in the "
        "heaviest 20 %.\n",
        markdown_table(["", *texts], [(name.strip(), *(of(t) for t in get.values())) for name, of in named.items()]),
        "\nThe sorted attention of the columns of a head: slope and R squared (mean over heads) of a straight line on "
        "a log-log scale, which is a power law, and R squared of an exponential and of a log-normal law; and the same "
        "for attention divided by what even attention gives to a column of that age.\n",
    ]
    rows = []
    for key, label in (("ranked", "as gathered"), ("ranked_by_age", "divided by age")):
        for name, t in get.items():
            slope, (power, exponential, normal) = fits(t[key], found)
            rows.append((label, name, f"{slope:.2f}", f"{power:.2f}", f"{exponential:.2f}", f"{normal:.2f}"))
    parts.append(markdown_table(["columns", "text", "slope", "power law", "exponential", "log-normal"], rows))
    parts.append("\nBy word, as in the paper's figure: the attention that all places of a word gathered in a layer.\n")
    rows = [
        (
            name,
            f"{w['different']:,} of {w['tokens']:,}",
            f"{np.mean(w['slope']):.2f}",
            f"{w['slope_of_counts']:.2f}",
            f"{np.mean(w['with_counts']):.2f}",
            f"{np.mean(w['each_with_counts']):.2f}",
        )
        for name, w in ((name, text["words"]) for name, text in texts.items())
    ]
    head = ["text", "words", "slope of attention", "slope of counts", "attention with counts", "per place with counts"]
    parts.append(markdown_table(head, rows))
    parts.append(
        "\nOf the attention that the last 64 queries give to what is before them, the share that falls on 20 % of it, "
        "chosen by the attention of the queries before; all entries, and without the first four.\n"
    )
    rows = [
        (rule, *(share(t[key][..., n].mean()) for t in get.values() for key in ("held", "held_beyond")))
        for n, rule in enumerate(found["choices"])
    ]
    parts.append(markdown_table(["kept", *(f"{n}, {w}" for n in texts for w in ("all", "without four"))], rows))
    return "\n".join(part.rstrip("\n") if part.startswith("|") else part for part in parts)


def layers_above(sparsity: np.ndarray) -> str:
    return f"{int((sparsity.mean(1) > 0.95).sum())} of {len(sparsity)}"


def draw(found: Found, path: Path) -> None:
    """Curves of gathered attention by layer, and maps of layers and heads, of the first text."""
    name, text = next(iter(found["texts"].items()))
    made = figure(13.0, 6.0)
    curves, *maps = made.subplots(1, 4, width_ratios=(1.5, 1, 1, 1))
    _curves(curves, np.array(text["curve"]).mean(1), np.array(found["even"]))
    _map(maps[0], np.array(text["sink"]), "on the first four tokens, %")
    _map(maps[1], np.array(text["beyond"])[..., 5], "in the top 5 % of the others, %")
    _map(maps[2], np.array(text["sparsity"]), "below 1 % of row maximum, %")
    maps[0].set_ylabel("layer", fontsize=8.5, color=INK)
    write(made, path, f"Attention of {found['model']} on {name}, by layer and head")


def _curves(axis: Axes, layers: np.ndarray, even: np.ndarray) -> None:
    calm(axis)
    at = np.arange(layers.shape[-1])
    for layer, curve in enumerate(layers):
        label = f"layer {layer}" if layer in (0, len(layers) // 2, len(layers) - 1) else None
        axis.plot(at, 100 * curve, color=colormaps["viridis"](0.9 * layer / (len(layers) - 1)), lw=1.0, label=label)
    axis.plot(at, 100 * even, "--", color=INK, lw=1.2, label="even attention")
    axis.set_xlim(0, 100)
    axis.set_ylim(0, 101)
    axis.set_xlabel("heaviest columns, % of all", fontsize=8.5, color=INK)
    axis.legend(frameon=False, fontsize=8, labelcolor=INK, loc="lower right")
    title(axis, "gathered attention, %")


def _map(axis: Axes, shares: np.ndarray, name: str) -> None:
    calm(axis, grid=False)
    cells = axis.pcolormesh(
        100 * shares, cmap=SCALE, vmin=0, vmax=100, edgecolors="white", linewidth=0.4, rasterized=True
    )  # one image: a path for each cell takes 100 KB
    bar = axis.figure.colorbar(cells, ax=axis, fraction=0.04, pad=0.02, format="%d %%")
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7, colors=INK, length=0)
    axis.invert_yaxis()
    axis.set_xticks(np.arange(shares.shape[1]) + 0.5, range(shares.shape[1]))
    axis.set_yticks(np.arange(0, len(shares), 5) + 0.5, range(0, len(shares), 5))
    axis.set_xlabel("query head", fontsize=8.5, color=INK)
    title(axis, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--page", type=Path, required=True, help=f"the tables go between its {BEGIN} and {END}")
    parser.add_argument("--svg", type=Path, required=True)
    args = parser.parse_args()
    content = args.results.read_bytes()
    found = json.loads(lzma.decompress(content) if args.results.suffix == ".xz" else content)
    before = args.page.read_text(encoding="utf-8")
    section = f"{BEGIN}\n{tables(found)}\n{END}"
    args.page.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: section, before, flags=re.DOTALL), encoding="utf-8")
    draw(found, args.svg)


if __name__ == "__main__":
    main()
