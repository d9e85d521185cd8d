"""`millpond eval-peer`: another implementation on the same model and prompts, in the same table."""

from __future__ import annotations

import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from millpond.cli.console import notes, output
from millpond.cli.options import DtypeName, ModelName, optional
from millpond.errors import OptionError, unknown
from millpond_lab.cli.options import Samples, SampleSeed

if TYPE_CHECKING:
    from millpond_lab.evals.peers.process import Peer
    from millpond_lab.evals.peers.run import PeerPlan

#: Peers, and their side of the line, in the repository's benchmarks/peers/.
SCRIPTS = {"kvpress": "kvpress_eval.py"}


def eval_peer(
    tasks: Annotated[str, typer.Option(help="As in 'millpond eval'; tasks that decode an answer.", show_default=False)],
    method: Annotated[
        str, typer.Option(help="The peer's presses; options as in SnapKVPress:window_size=16. full: none.")
    ] = "full,SnapKVPress",
    budget: Annotated[
        str | None, optional(help="As in 'millpond eval': the same entries are kept. Default: 20%.")
    ] = None,
    protocol: Annotated[str, typer.Option(help="aware or agnostic, or both.")] = "aware",
    model: ModelName = "pond-recall",
    samples: Samples = 40,
    seed: SampleSeed = 0,
    out: Annotated[
        Path, typer.Option(help="Folder of the results; that of a 'millpond eval' with the same settings will do.")
    ] = Path("millpond-eval"),
    dtype: DtypeName = "auto",
    device: Annotated[str, typer.Option(help="Device of the peer: cpu, cuda or cuda:1.")] = "cpu",
    threads: Annotated[int | None, optional(min=1, help="CPU threads of the peer. Default: torch's.")] = None,
    peer: Annotated[str, typer.Option(help="Name of the peer: kvpress.")] = "kvpress",
    python: Annotated[
        Path, typer.Option(help="Python of the peer's environment (benchmarks/peers/kvpress_env.sh makes one).")
    ] = Path("build/kvpress/bin/python"),
    export: Annotated[Path | None, optional(help="Write the prompts as requests, one a line, and run nothing.")] = None,
    answers: Annotated[
        Path | None, optional(help="Score the replies in this file, made from an export, and run nothing.")
    ] = None,
) -> None:
    """Score a peer's presses x budgets on tasks, beside Millpond's methods; lists are separated by commas."""
    from millpond.models.load import load_model, load_tokenizer
    from millpond_lab.evals.peers.run import PeerPlan
    from millpond_lab.evals.spec import parse_specs, words

    if peer not in SCRIPTS:
        raise unknown("peer", peer, SCRIPTS)
    if export is not None and answers is not None:
        raise OptionError("--export writes prompts and --answers scores replies; name one of them")

    def plan(name: str) -> PeerPlan:
        return PeerPlan(
            model,
            parse_specs(method, "method"),
            parse_specs(tasks, "tasks"),
            None if budget is None else words(budget, "budget"),
            protocols=words(protocol, "protocol"),
            samples=samples,
            seed=seed,
            batch_size=1,
            dtype=dtype,
            peer=name,
        )

    first = plan(peer)  # what is wrong with it is said before anything is started
    with ExitStack() as stack:
        them = None if export else _peer(stack, first, peer, python, answers, device, threads)
        tokenizer, loaded = load_tokenizer(model), load_model(model, dtype)
        if them is None:
            _export(first, loaded, tokenizer, export or Path())
        else:
            _run(plan(them.name), them, loaded, tokenizer, out)


def _peer(
    stack: ExitStack, plan: PeerPlan, name: str, python: Path, answers: Path | None, device: str, threads: int | None
) -> Peer:
    from millpond.models.load import resolve
    from millpond_lab.evals.peers.process import ReplyFile, RestartingPeer

    if answers is not None:
        return ReplyFile(answers)
    if not python.exists():
        maker = f"benchmarks/peers/{name}_env.sh"
        raise OptionError(f"{python} does not exist; make an environment for {name} with {maker}")
    command = [
        str(python),
        "-W",
        "ignore",
        str(_script(name)),
        "--model",
        resolve(plan.model),
        "--dtype",
        plan.dtype,
        "--device",
        device,
        *([] if threads is None else ["--threads", str(threads)]),
    ]
    return stack.enter_context(RestartingPeer(command, list(map(str, plan.methods))))


def _script(name: str) -> Path:
    """The peer's side of the line: in the working directory's checkout, or in the one that this package lies in."""
    places = [folder / "benchmarks" / "peers" / SCRIPTS[name] for folder in (Path(), Path(__file__).parents[5])]
    for place in places:
        if place.exists():
            return place
    raise OptionError(f"{places[0]} is not here; it lies in the repository: run the command there")


def _export(plan: PeerPlan, model: Any, tokenizer: Any, path: Path) -> None:
    from millpond_lab.evals.peers.run import export

    count = export(plan, model, tokenizer, path)
    output().print(f"{count:,} requests written to {escape(str(path))}", soft_wrap=True, highlight=False)


def _run(plan: PeerPlan, them: Peer, model: Any, tokenizer: Any, out: Path) -> None:
    from millpond_lab.bench.common.machine import describe_machine
    from millpond_lab.cli.eval import progress_bars, show_scores
    from millpond_lab.evals.peers.run import run_peer

    machine = describe_machine()
    note = {
        "command": shlex.join(["millpond", *sys.argv[1:]]),
        "hardware": machine.hardware,
        "software": them.software or machine.software,
    }
    with notes(), progress_bars(plan.cells()) as progress:
        rows = run_peer(plan, them, model, tokenizer, out, note, progress)
    show_scores(rows, out)
