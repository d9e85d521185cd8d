"""Every type of language model of the installed transformers, in tiny form, under our caches and under its own.

    python benchmarks/models/model_types.py [TYPE ...] [--json benchmarks/results/model-types.json]

Random weights, float32, a padded batch of two, each type in a process of its own. Types given by name are updated in an
existing file; without names the file is written from scratch. `millpond_lab.bench.model_types` defines equality.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import transformers

from millpond_lab.bench.model_types.page import survey
from millpond_lab.bench.model_types.tiny_model import causal_types, composite_types


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    parts = {"text": causal_types(), "composite": composite_types()}
    every = [kind for part in parts.values() for kind in part]
    unknown = set(args.types) - set(every)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: not among the language models of transformers")
    findings = {}
    for finding in survey(args.types or every):
        reasons = {finding.reason, *(outcome.reason for outcome in finding.outcomes.values())} - {""}
        print(f"{finding.model_type:24} {finding.status:10} {'; '.join(sorted(reasons))}", flush=True)
        findings[finding.model_type] = finding.as_dict()
    if args.json is None:
        return
    if args.types and args.json.exists():
        before = json.loads(args.json.read_text(encoding="utf-8"))
        findings = {row["model_type"]: row for part in parts for row in before[part]} | findings
    data = {
        "command": "python benchmarks/models/model_types.py",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **{part: [findings[kind] for kind in kinds if kind in findings] for part, kinds in parts.items()},
    }
    args.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
