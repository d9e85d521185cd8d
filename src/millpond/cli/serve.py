"""`millpond serve`: an OpenAI-compatible server for one model, and a page that shows its KV cache."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from millpond.budget import FLOOR, parse_bytes
from millpond.cli.console import errors
from millpond.cli.options import (
    BudgetFloor,
    CacheChoice,
    ChunkDtype,
    DeviceMemory,
    DeviceName,
    Disk,
    DtypeName,
    Memory,
    ModelName,
    OptionGroup,
    OverflowRule,
    PressureRule,
    Threads,
    TrustRemoteCode,
    Weights,
    device_of_engine,
    expand_groups,
    optional,
    parse_options,
)
from millpond.cli.serve_summary import show_requests, summary
from millpond.cpu_limit import usable_cpus
from millpond.errors import OptionError
from millpond.install_command import install_command

if TYPE_CHECKING:
    from millpond.cache.chunks.store import ChunkStore
    from millpond.server.llm_protocol import ServedLLM


#: API keys, separated by commas, so that they are not in the list of processes.
KEYS_VARIABLE = "MILLPOND_API_KEYS"
#: The operator's key, for the same reason.
OPERATOR_VARIABLE = "MILLPOND_OPERATOR_KEY"
#: Priority limits (KEY=N), separated by commas, for the same reason.
LIMITS_VARIABLE = "MILLPOND_PRIORITY_LIMITS"


@dataclass(frozen=True, kw_only=True)
class EngineChoice(OptionGroup):
    """Memory and steps of the engine."""

    kv_memory: Annotated[
        str | None, optional(help="Limit of the memory for the caches of all requests ('2GiB'). Default: no limit.")
    ] = None
    max_step_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of one step: more read prompts faster, fewer shorten the wait of others.")
    ] = 512
    prefix_cache: Annotated[
        str | None,
        optional(
            metavar="RULE",
            help="Keep prompts for others that begin alike, while there is memory; what goes first: lru or learned, or "
            "lfu, marker, mark0 or mark_predict of millpond-lab. Default: lru with --kv-memory.",
        ),
    ] = None
    no_prefix_cache: Annotated[bool, typer.Option("--no-prefix-cache", help="Keep no prompts.")] = False
    pager: Annotated[
        Path | None, optional(help="A file of 'millpond train pager' for a rule that predicts. Default: ours.")
    ] = None
    prefix_disk: Annotated[
        str | None, optional(help="Disk for kept prompts that leave the memory ('20GiB'). Default: they are forgotten.")
    ] = None
    prefix_folder: Annotated[
        Path | None, optional(help="Folder of --prefix-disk. Default: the system's folder for temporary files.")
    ] = None
    swap_to: Annotated[
        Path | None, optional(help="Folder for the caches of preempted requests. Default: the host's memory.")
    ] = None
    overflow: OverflowRule = "refuse"
    on_pressure: PressureRule = "evict"
    runner: Annotated[
        str, typer.Option(help="Forward pass: lean (ours), modules (those of transformers), or auto.")
    ] = "auto"
    weights: Weights = None
    chunk_store: Annotated[
        Path | None, optional(help="Folder for keys and values of chunks that prompts hold. Default: no chunks.")
    ] = None
    chunk_memory: Annotated[str, typer.Option(help="Chunks in memory, at most.")] = "1GiB"
    chunk_disk: Annotated[str, typer.Option(help="Chunks in the folder, at most.")] = "20GiB"
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same bits whatever runs with a request; prompts are slower.")
    ] = False
    chunk_dtype: ChunkDtype = "auto"
    chunk_rule: Annotated[
        str, typer.Option(metavar="RULE", help="Which chunks leave full tiers: a rule as of --prefix-cache.")
    ] = "lru"

    cache_dir: Annotated[
        Path | None,
        optional(
            help="Folder for the caches of finished turns: later requests that continue them go on from there, "
            "after a restart too. Default: none."
        ),
    ] = None
    cache_disk: Annotated[str, typer.Option(help="Files in --cache-dir, at most.")] = "20GiB"
    trust_remote_code: TrustRemoteCode = False
    budget_floor: BudgetFloor = FLOOR
    max_model_len: Annotated[
        int | None, optional(min=1, help="Tokens of a prompt and its answer, at most. Default: the model's context.")
    ] = None

    def as_arguments(self) -> dict[str, Any]:
        """Fields of `EngineConfig`.

        Raises:
            OptionError: a rule for a prefix cache, and none.
        """
        if self.no_prefix_cache and self.prefix_cache is not None:
            raise OptionError(f"--prefix-cache {self.prefix_cache} and --no-prefix-cache contradict; leave one out")
        if self.cache_dir is None and "cache_disk" in self.given:
            raise OptionError("--cache-disk needs --cache-dir")
        prefixes = self.prefix_cache or (self.kv_memory is not None and not self.no_prefix_cache)
        return {
            "kv_memory": self.kv_memory,
            "max_step_tokens": self.max_step_tokens,
            "prefix_cache": prefixes,
            "pager": self.pager,
            "prefix_disk": self.prefix_disk,
            "prefix_folder": self.prefix_folder,
            "swap_to": self.swap_to,
            "runner": self.runner,
            "weights": self.weights,
            "chunk_store": self._chunks(),
            "deterministic": self.deterministic,
            "overflow": self.overflow,
            "on_pressure": self.on_pressure,
            "cache_dir": self.cache_dir,
            "cache_disk": None if self.cache_dir is None else self.cache_disk,
            "trust_remote_code": self.trust_remote_code,
            "max_model_len": self.max_model_len,
            "budget_floor": self.budget_floor,
        }

    def _chunks(self) -> ChunkStore | None:
        """
        Raises:
            OptionError: limits of a store without its folder.
        """
        if self.chunk_store is not None:
            from millpond.cache.chunks.store import ChunkStore

            return ChunkStore(
                self.chunk_store,
                memory=self.chunk_memory,
                disk=self.chunk_disk,
                dtype=self.chunk_dtype,
                rule=self.chunk_rule,
            )
        if given := self.given & {"chunk_memory", "chunk_disk", "chunk_dtype", "chunk_rule"}:
            raise OptionError(f"--{min(given).replace('_', '-')} needs --chunk-store")
        return None


@dataclass(frozen=True, kw_only=True)
class Workers(OptionGroup):
    """Several engines behind one address, in processes that Ray starts."""

    replicas: Annotated[
        int | None, optional(min=1, help="Engines that answer, each with its own memory limit. Default: one, no Ray.")
    ] = None
    prefill: Annotated[
        int | None, optional(min=1, help="Engines that read prompts, for --decode ones that continue.")
    ] = None
    decode: Annotated[int | None, optional(min=1, help="Engines that decode behind --prefill ones.")] = None
    layout: Annotated[
        Path | None, optional(help="Workers as a file of 'millpond cluster plan --out' recommends them.")
    ] = None
    address: Annotated[
        str | None, optional(help="A running Ray cluster; auto: this machine's. Default: a private one.")
    ] = None
    handoff_memory: Annotated[str, typer.Option(help="Caches that wait in a --prefill engine for others, at most.")] = (
        "256MiB"
    )
    checkpoint_tokens: Annotated[
        int | None,
        optional(
            min=1,
            help="Copy the cache of a request to the server after every N tokens, so that it goes on from there where "
            "its worker is lost; --handoff-memory bounds the copies. Default: none.",
        ),
    ] = None

    @property
    def several(self) -> bool:
        """Whether there is more than this process's engine."""
        return not {"replicas", "prefill", "decode", "layout"}.isdisjoint(self.given)

    def as_arguments(self, threads: int | None = None) -> dict[str, Any]:
        """Those of `millpond.cluster.AsyncLLM`.

        Args:
            threads: of each worker.

        Raises:
            OptionError: options of a cluster without workers, or a plan that does not fit this machine or the other
                options. DataError: no plan.
        """
        if not self.several and (lost := self.given & {"address", "handoff_memory", "checkpoint_tokens"}):
            raise OptionError(f"--{min(lost).replace('_', '-')} needs --replicas, --layout, or --prefill and --decode")
        numbers = {"replicas": self.replicas, "prefill": self.prefill, "decode": self.decode}
        if self.layout is not None:
            if given := self.given & numbers.keys():
                raise OptionError(f"--layout says how many workers do what: leave --{min(given)} out")
            numbers = _planned(self.layout, self.address, threads)
        return {
            **numbers,
            "address": self.address,
            "handoff_memory": self.handoff_memory,
            "checkpoint_tokens": self.checkpoint_tokens,
        }


def _planned(layout: Path, address: str | None, threads: int | None) -> dict[str, int | None]:
    """Numbers of workers by role, of a plan that this machine can run.

    Raises:
        OptionError: workers of several devices, or more threads than this machine has CPUs. DataError: no plan.
    """
    from millpond.cluster.layout_file import load_plan

    plan = load_plan(str(layout))
    if plan.devices > 1:
        raise OptionError(
            f"{layout} has workers of {plan.devices} devices, and an engine has one: plan with a profile of one device "
            "per worker"
        )
    cpus, each = usable_cpus(), threads or 1
    if address is None and plan.count * each > cpus:
        raise OptionError(
            f"{layout} has {plan.count} workers of {each} threads, and this machine has {cpus} CPUs: plan with fewer "
            "--devices, give fewer --threads, or name a running Ray cluster with --address"
        )
    numbers = {"replicas": plan.replicas, "prefill": plan.prefill, "decode": plan.decode}
    return {role: number or None for role, number in numbers.items()}


@dataclass(frozen=True, kw_only=True)
class RequestLimits(OptionGroup):
    """Limits on the size, the number and the time of requests."""

    max_queue: Annotated[int, typer.Option(min=1, help="Prompts that may wait; beyond it: 429.")] = 256
    max_tokens: Annotated[
        int | None, optional(min=1, help="New tokens per answer, at most. Default: what the context holds.")
    ] = None
    max_body: Annotated[str, typer.Option(help="Size of a request's body, at most.")] = "16MiB"
    max_body_items: Annotated[
        int, typer.Option(min=16, help="Values in a body, at most; 1/8 as many keys, 1/16 as many arrays and objects.")
    ] = 2**17
    max_bodies: Annotated[
        str, typer.Option(help="Size of the bodies of all requests in flight, at most; beyond it: 503.")
    ] = "256MiB"
    max_connections: Annotated[
        int, typer.Option(min=1, help="Beyond it the connection is closed that keeps the server waiting longest.")
    ] = 512
    header_timeout: Annotated[float, typer.Option(help="Seconds in which the header of a request must arrive.")] = 10.0
    body_timeout: Annotated[float, typer.Option(help="Seconds in which its body must arrive.")] = 30.0
    write_timeout: Annotated[
        float, typer.Option(help="Seconds after which a client that does not read its answer is disconnected.")
    ] = 60.0
    timeout: Annotated[
        float | None, optional(help="Seconds after which a request ends with what it has. Default: none.")
    ] = None
    drain: Annotated[
        float, typer.Option(min=0, help="Seconds that requests have to finish when the server is stopped.")
    ] = 30.0
    step_limit: Annotated[
        float, typer.Option(help="Seconds that a step of the engine may take; beyond it /health answers 503.")
    ] = 120.0

    def as_settings(self) -> dict[str, Any]:
        """Fields of `ServerSettings`.

        Raises:
            BudgetError: not an amount of bytes.
        """
        return {
            "max_queue": self.max_queue,
            "max_tokens": self.max_tokens,
            "max_body_bytes": parse_bytes(self.max_body),
            "max_body_items": self.max_body_items,
            "max_bytes_under_way": parse_bytes(self.max_bodies),
            "max_connections": self.max_connections,
            "header_timeout_s": self.header_timeout,
            "body_timeout_s": self.body_timeout,
            "write_timeout_s": self.write_timeout,
            "timeout_s": self.timeout,
            "drain_s": self.drain,
            "step_limit_s": self.step_limit,
        }


@dataclass(frozen=True, kw_only=True)
class Access(OptionGroup):
    """Clients, hosts and files that requests may name."""

    option_file: Annotated[
        list[str] | None,
        optional(
            metavar="NAME=PATH",
            help="A file that options of requests may name, by this name; may be repeated. No other file can be named.",
        ),
    ] = None
    api_key: Annotated[
        list[str] | None,
        optional(help=f"A key that clients must send; may be repeated. Also: {KEYS_VARIABLE}, separated by commas."),
    ] = None
    operator_key: Annotated[
        str | None,
        optional(
            help=f"The key that lists and drains workers under /cluster. Also: {OPERATOR_VARIABLE}. Default: none."
        ),
    ] = None
    allow_host: Annotated[
        list[str] | None,
        optional(help="A name by which clients may call the server, in addition to localhost; may be repeated."),
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        optional(
            metavar="ORIGIN",
            help="An origin of web pages whose scripts may call the server (https://example.org), or '*'; may be "
            "repeated. Default: none.",
        ),
    ] = None
    trusted_proxy: Annotated[
        list[str] | None,
        optional(
            metavar="ADDRESS",
            help="A proxy, or a network of proxies, whose X-Forwarded-For names the client; may be repeated. Default: "
            "none; clients without keys are then identified by the addresses that they connect from.",
        ),
    ] = None
    priority_limit: Annotated[
        list[str] | None,
        optional(
            metavar="[KEY=]N",
            help="The lowest (best) priority for requests with a key; without KEY=, for all others. Default: 0. May be "
            f"repeated. Also: {LIMITS_VARIABLE}, separated by commas.",
        ),
    ] = None

    def as_settings(self) -> dict[str, Any]:
        """Fields of `ServerSettings`, with what the environment adds.

        Raises:
            OptionError: not NAME=PATH, or a priority limit that is no whole number.
        """
        return {
            "api_keys": (*(self.api_key or ()), *keys_of(os.environ.get(KEYS_VARIABLE, ""))),
            "operator_key": self.operator_key or os.environ.get(OPERATOR_VARIABLE) or None,
            "option_files": parse_options(self.option_file or [], "heads=heads.json"),
            "allowed_hosts": tuple(self.allow_host or ()),
            "cors_origins": tuple(self.cors_origin or ()),
            "trusted_proxies": tuple(self.trusted_proxy or ()),
            "priority_limits": limits_of([*keys_of(os.environ.get(LIMITS_VARIABLE, "")), *(self.priority_limit or ())]),
        }


def keys_of(text: str) -> list[str]:
    """Items of a variable, separated by commas.

    Example:
        >>> keys_of("one, two,")
        ['one', 'two']
    """
    return [key.strip() for key in text.split(",") if key.strip()]


def limits_of(texts: list[str]) -> dict[str, int]:
    """Priority limits by key; that of all others by "".

    Raises:
        OptionError: no whole number.

    Example:
        >>> limits_of(["alice=-5", "2"])
        {'alice': -5, '': 2}
    """
    limits = {}
    for text in texts:
        key, _, number = text.rpartition("=")
        try:
            limits[key] = int(number)
        except ValueError:
            shown = "KEY=..." if key else repr(text)  # a key is not shown
            raise OptionError(f"--priority-limit {shown}: must be a whole number, or KEY= and one") from None
    return limits


@expand_groups
def serve(
    *,
    model: ModelName = "pond-recall",
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    served_name: Annotated[str | None, optional(help="The model's name for clients. Default: as --model.")] = None,
    cache: CacheChoice,
    engine: EngineChoice,
    memory: Memory = None,
    disk: Disk = None,
    device: DeviceName = None,
    device_memory: DeviceMemory = None,
    dtype: DtypeName = "auto",
    threads: Threads = None,
    tool_parser: Annotated[
        str,
        typer.Option(
            help="How the model writes calls of tools: hermes, llama3, mistral, auto (as its chat template does), "
            "or none (calls stay in the text)."
        ),
    ] = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", help="No line per request.")] = False,
    workers: Workers,
    limits: RequestLimits,
    access: Access,
) -> None:
    """Serve a model over OpenAI's HTTP API inside a memory limit; http://HOST:PORT/ is a page to chat on."""
    try:
        from millpond.server.settings import ServerSettings
        from millpond.server.uvicorn_server import run
    except ModuleNotFoundError as error:
        raise OptionError(f"the server needs {error.name}: {install_command('server')}") from error
    from millpond.engine.async_llm import AsyncLLM
    from millpond.engine.config import EngineConfig

    settings = ServerSettings(**limits.as_settings(), **access.as_settings(), tool_parser=tool_parser)
    config = EngineConfig(**cache.for_request(), calibration=cache.calibration, **engine.as_arguments())
    name, kind, layout = (
        served_name or name_of(model),
        None if dtype == "auto" else dtype,
        workers.as_arguments(threads),
    )
    llm: ServedLLM
    if workers.several:
        from millpond.cluster.async_llm import AsyncClusterLLM

        if device is not None or device_memory is not None:
            raise OptionError("workers compute on a CPU: leave --device and --device-memory out with workers")
        if memory is not None or disk is not None or config.chunk_store is not None or config.cache_dir is not None:
            raise OptionError(
                "--memory, --disk, --chunk-store and --cache-dir are those of one engine: leave them out with workers"
            )
        llm = AsyncClusterLLM(model, config, model_name=name, dtype=kind, threads=threads, **layout)
    else:
        llm = AsyncLLM(
            model,
            config,
            model_name=name,
            dtype=kind,
            threads=threads,
            memory=memory,
            disk=disk,
            device=device_of_engine(device, disk, config.weights, memory),
            device_memory=device_memory,
        )
    if not settings.api_keys and host not in ("127.0.0.1", "localhost", "::1"):
        errors().print(
            f"[yellow]note:[/] anyone who can reach {escape(host)} may use the model; --api-key limits that to holders "
            "of a key"
        )
    if not quiet:
        show_requests()

    def told(port: int) -> None:
        for line in summary(llm, settings, host, port):
            errors().print(escape(line), soft_wrap=True, highlight=False)

    run(llm, settings, host=host, port=port, listens=told)


def name_of(model: str) -> str:
    """A model's name for clients: a hub id or a name as it is, a folder by its last part, a GGUF file by its stem.

    Example:
        >>> name_of("pond-recall")
        'pond-recall'
    """
    path = Path(model)
    if path.suffix.lower() == ".gguf":
        return path.stem
    return path.resolve().name if path.is_dir() else model
