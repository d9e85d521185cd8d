"""Facts that reach over the seams of chunks, answered from stored chunks of pond-recall.

Usage: python benchmarks/quality/chunk_seams.py [--samples 100] [--chunks 8] [--tokens 64] [--threads 1] [--seed 0]
    [--out benchmarks/results/chunk-seams]

Each chunk but the last ends with a name, and the next one begins with the thing of this name; the words between say
nothing. Other facts, as many, lie inside chunks. Each text has two questions: one about a fact over a seam, one about a
fact inside a chunk. An answer is right if the token behind the name is the right one; greedy, float32. Chunks are
stored alone, or behind words of another text, and reused with several shares computed again. Differences are from the
plain prompt, in points, with 95 % intervals by a bootstrap over texts.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import millpond as mp
from millpond_lab.bench.common.machine import describe_machine
from millpond_lab.bench.common.report import markdown_table, write_report
from millpond_lab.pond import words as w
from millpond_lab.pond.facts import filler

Ids = tuple[int, ...]
KINDS = ("over a seam", "inside a chunk")
#: Where chunks come from, and what is computed again; the plain prompt is the first.
SETTINGS: tuple[tuple[str, Any], ...] = (
    ("", 1),
    ("alone", 0),
    ("alone", 0.05),
    ("alone", 0.15),
    ("alone", "auto"),
    ("behind", 0),
    ("behind", 0.05),
    ("behind", 0.15),
    ("behind", "auto"),
)
#: Tokens of another text before a stored chunk.
CONTEXT = 64


class Sample(NamedTuple):
    """Chunks of a text, and a question and the id of its answer by kind of fact."""

    chunks: list[Ids]
    questions: list[tuple[Ids, int]]


def draw(seed: int, index: int, n_chunks: int, tokens: int) -> Sample:
    """A text whose facts reach over each seam, with one fact inside each chunk as well."""
    rng = np.random.default_rng((seed, index))
    names = rng.choice(np.array(w.ids(w.NAMES)), 2 * n_chunks, replace=False).tolist()
    things = rng.choice(np.array(w.ids(w.THINGS)), 2 * n_chunks, replace=False).tolist()
    chunks: list[Ids] = []
    for place in range(n_chunks):
        words = filler(rng, tokens - 4, "uniform").tolist()
        first = [things[place - 1]] if place else filler(rng, 1, "uniform").tolist()
        last = [names[place]] if place < n_chunks - 1 else filler(rng, 1, "uniform").tolist()
        middle = tokens // 2
        inside = [names[n_chunks + place], things[n_chunks + place]]
        chunks.append((*first, *words[:middle], *inside, *words[middle:], *last))
    over, inner = int(rng.integers(n_chunks - 1)), n_chunks + int(rng.integers(n_chunks))
    return Sample(chunks, [(question(names[fact]), things[fact]) for fact in (over, inner)])


def question(name: int) -> Ids:
    return (w.ID[w.ASK], name, w.ID[w.IS], name)


class Reader:
    """pond-recall with a store of chunks computed alone, and one of chunks computed behind other words."""

    def __init__(self) -> None:
        model = mp.load_model("pond-recall", "f32")
        self.llms = {
            kind: mp.LLM(model, method="full", chunk_store=mp.ChunkStore(None, memory="1GiB"))
            for kind in ("alone", "behind")
        }
        self.llms[""] = mp.LLM(model, method="full")
        self._params = mp.SamplingParams(max_tokens=1, temperature=0)

    def store(self, sample: Sample, rng: np.random.Generator) -> None:
        """Compute the chunks of a text for both stores."""
        alone = [mp.Prompt([mp.Chunk(chunk), chunk[:1]]) for chunk in sample.chunks]
        behind = [
            mp.Prompt([tuple(filler(rng, CONTEXT, "uniform").tolist()), mp.Chunk(chunk), chunk[:1]])
            for chunk in sample.chunks
        ]
        self.llms["alone"].generate(alone, self._params)
        self.llms["behind"].generate(behind, self._params)

    def read(self, sample: Sample, source: str, share: Any) -> list[tuple[bool, float]]:
        """Whether each question is answered, and the share of its prompt that was computed."""
        begin = (w.ID[w.BOS],)
        found = []
        for ask, answer in sample.questions:
            if source:
                prompt: Any = mp.Prompt([begin, *(mp.Chunk(chunk) for chunk in sample.chunks), ask])
                options = mp.CacheOptions(recompute=share)
            else:
                prompt, options = tuple(token for part in (begin, *sample.chunks, ask) for token in part), None
            (out,) = self.llms[source].generate([prompt], self._params, cache=options)
            kv = out.completions[0].kv
            assert kv is not None, "it has a cache"
            computed = 1 - kv.reused_tokens / len(out.prompt_token_ids) if source else 1.0
            found.append((out.completions[0].token_ids[0] == answer, computed))
        return found


def interval(right: np.ndarray, plain: np.ndarray) -> tuple[float, float, float]:
    """Difference of means in points, and its 95 % interval by a bootstrap over texts."""
    drawn = np.random.default_rng(7).integers(0, len(right), (2000, len(right)))
    difference = 100.0 * (right.astype(float) - plain)
    low, high = np.percentile(difference[drawn].mean(1), [2.5, 97.5])
    return float(difference.mean()), float(low), float(high)


def table(rows: dict[tuple[str, Any], list[list[tuple[bool, float]]]]) -> tuple[str, list[dict[str, Any]]]:
    right = {setting: np.array([[good for good, _ in one] for one in found]) for setting, found in rows.items()}
    lines, data = [], []
    for (source, share), found in rows.items():
        computed = float(np.mean([part for one in found for _, part in one]))
        against = [interval(right[source, share][:, kind], right["", 1][:, kind]) for kind in range(2)]
        means = right[source, share].mean(0).tolist()
        name = f"{source}, {share if share == 'auto' else f'{share:.0%}'}" if source else "plain prompt"
        data.append(
            {
                "setting": name,
                "computed": computed,
                "right": dict(zip(KINDS, means, strict=True)),
                "points": dict(zip(KINDS, against, strict=True)),
                "texts": len(found),
            }
        )
        cells = (
            f"{mean:.1%}, {mid:+.1f} [{low:+.1f}, {high:+.1f}]"
            for mean, (mid, low, high) in zip(means, against, strict=True)
        )
        lines.append((name, f"{computed:.0%}", *cells))
    return markdown_table(("stored, computed again", "of the prompt computed", *KINDS), lines), data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("samples", 100), ("chunks", 8), ("tokens", 64), ("threads", 1), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    reader = Reader()
    rows: dict[tuple[str, Any], list[list[tuple[bool, float]]]] = {setting: [] for setting in SETTINGS}
    for index in range(args.samples):
        sample = draw(args.seed, index, args.chunks, args.tokens)
        reader.store(sample, np.random.default_rng((args.seed, index, 1)))
        for setting in SETTINGS:
            rows[setting].append(reader.read(sample, *setting))
        if (index + 1) % 20 == 0:
            print(f"{index + 1} texts\n{table(rows)[0]}", flush=True)
            write(args, rows)
    for llm in reader.llms.values():
        llm.close()
    write(args, rows)


def write(args: argparse.Namespace, rows: dict[tuple[str, Any], list[list[tuple[bool, float]]]]) -> None:
    if args.out is None:
        return
    shown, data = table(rows)
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    report = describe_machine().header("chunk-seams") | {"settings": settings, "rows": data}
    page = f"# Facts over the seams of chunks, pond-recall\n\n{report['hardware']}; {report['software']}.\n\n"
    page += f"{len(rows['', 1])} texts of {args.chunks} x {args.tokens} tokens, a question of each kind; questions "
    page += f"answered, and points from the plain prompt with 95 % intervals over texts.\n\n{shown}\n"
    write_report(args.out.parent, args.out.name, report, page)


if __name__ == "__main__":
    main()
