"""`millpond serve`: an OpenAI-compatible server for one model, and a page that shows its KV cache."""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.markup import escape

from millpond.budget import FLOOR
from millpond.cache.paging.choose import LIVE
from millpond.cli.chunk_options import ChunkChoice
from millpond.cli.console import errors, size
from millpond.cli.options import CacheChoice, EnginePlace, ModelName, OptionGroup, expand_groups, optional
from millpond.cli.setting_options import option_of
from millpond.cluster.settings import ClusterSettings
from millpond.cpu_limit import usable_cpus
from millpond.engine.settings import EngineSettings
from millpond.errors import OptionError
from millpond.install_command import install_command
from millpond.option_pairs import parse_options
from millpond.server.settings import ServerSettings
from millpond.setting import settings_of

if TYPE_CHECKING:
    from millpond.engine.config import EngineConfig
    from millpond.server.llm_protocol import ServedLLM


@dataclass(frozen=True, kw_only=True)
class EngineChoice(OptionGroup):
    """Memory and steps of the engine."""

    kind = EngineSettings
    order = (
        "kv_memory",
        "max_step_tokens",
        "prefix_cache",
        "no_prefix_cache",
        "pager",
        "prefix_disk",
        "prefix_folder",
        "storage_codec",
        "storage_delay_s",
        "swap_to",
        "preemption",
        "overflow",
        "on_pressure",
        "runner",
        "weights",
        "deterministic",
        "cache_dir",
        "cache_disk",
        "trust_remote_code",
        "budget_floor",
        "max_model_len",
    )
    usual: ClassVar = {"budget_floor": FLOOR, "cache_disk": "20GiB"}

    prefix_cache: Annotated[
        str | None,
        option_of(
            EngineSettings,
            "prefix_cache",
            default_text="lru with `kv_memory` or `storage_codec`, else live",
            show_default=False,
        ),
    ] = None
    no_prefix_cache: Annotated[bool, typer.Option("--no-prefix-cache", help="Share no prompts.")] = False

    def as_arguments(self) -> dict[str, Any]:
        """Return fields of `EngineConfig`.

        Raises:
            OptionError: a rule for a prefix cache, and none.
        """
        if self.no_prefix_cache and self.prefix_cache is not None:
            raise OptionError(f"--prefix-cache {self.prefix_cache} and --no-prefix-cache contradict; leave one out")
        taken, folder = self.settings, self.settings["cache_dir"]
        if folder is None and "cache_disk" in self.given:
            raise OptionError("--cache-disk needs --cache-dir")
        return {
            **taken,
            "prefix_cache": self.prefix_cache or self._usual_sharing,
            "cache_disk": None if folder is None else taken["cache_disk"],
        }

    @property
    def _usual_sharing(self) -> bool | str:
        """Value of `prefix_cache` where no rule is given."""
        if self.no_prefix_cache:
            return False
        return LIVE if self.settings["kv_memory"] is None else True


@dataclass(frozen=True, kw_only=True)
class Workers(OptionGroup):
    """Several engines behind one address, in processes that Ray starts."""

    kind = ClusterSettings
    order = ("replicas", "prefill", "decode", "layout", "address", "handoff_memory", "checkpoint_tokens", "replan_s")

    layout: Annotated[
        Path | None, optional(help="Numbers of workers from a file of 'millpond cluster plan --out'.")
    ] = None

    @property
    def several(self) -> bool:
        """Whether there is more than this process's engine."""
        return not {"replicas", "prefill", "decode", "layout"}.isdisjoint(self.given)

    def as_arguments(self, threads: int | None = None) -> dict[str, Any]:
        """Return the arguments of `millpond.cluster.AsyncLLM`.

        Args:
            threads: Threads of each worker.

        Raises:
            OptionError: options of a cluster without workers, or a plan that does not fit this machine or the other
                options.
            DataError: no plan.
        """
        if not self.several and (lost := self.given & {"address", "handoff_memory", "checkpoint_tokens", "replan_s"}):
            raise OptionError(f"--{min(lost).replace('_', '-')} needs --replicas, --layout, or --prefill and --decode")
        if self.layout is None:
            return dict(self.settings)
        if given := self.given & {"replicas", "prefill", "decode"}:
            raise OptionError(f"--layout says how many workers do what: leave --{min(given)} out")
        return {**self.settings, **_planned(self.layout, self.settings["address"], threads)}


def _planned(layout: Path, address: str | None, threads: int | None) -> dict[str, int | None]:
    """Return numbers of workers by role, of a plan that this machine can run.

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

    kind = ServerSettings
    order = (
        "max_queue",
        "max_tokens",
        "max_body_bytes",
        "max_body_items",
        "max_bytes_under_way",
        "max_images",
        "max_image_bytes",
        "max_image_pixels",
        "max_connections",
        "header_timeout_s",
        "body_timeout_s",
        "write_timeout_s",
        "timeout_s",
        "drain_s",
        "step_limit_s",
    )


@dataclass(frozen=True, kw_only=True)
class Access(OptionGroup):
    """Clients, hosts and files that requests may name."""

    kind = ServerSettings
    order = (
        "option_files",
        "api_keys",
        "operator_key",
        "allowed_hosts",
        "cors_origins",
        "trusted_proxies",
        "priority_limits",
    )

    def as_settings(self) -> dict[str, Any]:
        """Return fields of `ServerSettings`, with what the environment adds.

        Raises:
            OptionError: not NAME=PATH, or a priority limit that is no whole number.
        """
        taken = self.settings
        variables = {name: one.variable for name, one in settings_of(self.kind).items() if one.variable}
        set_outside = {name: os.environ.get(variable, "") for name, variable in variables.items()}
        limits = [*keys_of(set_outside["priority_limits"]), *(taken["priority_limits"] or ())]
        return {
            **taken,
            "api_keys": (*taken["api_keys"], *keys_of(set_outside["api_keys"])),
            "operator_key": taken["operator_key"] or set_outside["operator_key"] or None,
            "option_files": parse_options(taken["option_files"] or [], "heads=heads.json"),
            "priority_limits": limits_of(limits),
        }


def keys_of(text: str) -> list[str]:
    """Return the items of a variable, separated by commas.

    Example:
        >>> keys_of("one, two,")
        ['one', 'two']
    """
    return [key.strip() for key in text.split(",") if key.strip()]


def limits_of(texts: list[str]) -> dict[str, int]:
    """Return priority limits by key; that of all others by "".

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
    chunks: ChunkChoice,
    place: EnginePlace,
    pipeline: Annotated[
        int | None,
        optional(
            min=2, help="Processes on this machine among which the model's layers are divided, with weights and caches."
        ),
    ] = None,
    tool_parser: Annotated[str, option_of(ServerSettings, "tool_parser")] = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", help="No line per request.")] = False,
    workers: Workers,
    limits: RequestLimits,
    access: Access,
) -> None:
    """Serve a model over OpenAI's HTTP API inside a memory limit; http://HOST:PORT/ is a page to chat on."""
    check_port(host, port)
    try:
        from millpond.server.uvicorn_server import run
    except ModuleNotFoundError as error:
        raise OptionError(f"the server needs {error.name}: {install_command('server')}") from error
    from millpond.engine.async_llm import AsyncLLM
    from millpond.engine.config import EngineConfig

    settings = ServerSettings(**limits.settings, **access.as_settings(), tool_parser=tool_parser)
    config = EngineConfig(
        **cache.for_request(), calibration=cache.calibration, chunk_store=chunks.store(), **engine.as_arguments()
    )
    name, layout = served_name or name_of(model), workers.as_arguments(place.threads)
    errors().print(escape(f"loading  {name}"), soft_wrap=True, highlight=False)
    llm: ServedLLM
    if pipeline is None and not workers.several:
        llm = AsyncLLM(model, config, model_name=name, **place.as_arguments(config.weights))
    else:
        _check_on_cpu("workers" if pipeline is None else "--pipeline", place, config)
        shared: dict[str, Any] = {"model_name": name, "dtype": place.chosen_dtype, "threads": place.threads}
        if pipeline is None:
            from millpond.cluster.async_llm import AsyncClusterLLM

            llm = AsyncClusterLLM(model, config, **shared, **layout)
        elif workers.several:
            raise OptionError("--pipeline is one engine, and workers have one each: leave one of the two out")
        else:
            from millpond.cluster.async_pipeline import AsyncPipelineLLM

            llm = AsyncPipelineLLM(model, config, stages=pipeline, **shared)
    if not settings.api_keys and host not in ("127.0.0.1", "localhost", "::1"):
        errors().print(
            f"[yellow]note:[/] anyone who can reach {escape(host)} may use the model; --api-key limits that to holders "
            "of a key"
        )
    show_log(requests=not quiet)

    def told(port: int) -> None:
        for line in summary(llm, settings, host, port):
            errors().print(escape(line), soft_wrap=True, highlight=False)

    run(llm, settings, host=host, port=port, listens=told)


def check_port(host: str, port: int) -> None:
    """Check that an address can be listened on, before a model is loaded for it.

    Raises:
        OptionError: Its port is in use or reserved for the administrator, or no network card of this machine has it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((host, port))
    except OSError as error:  # what else is wrong with the address the server itself tells
        reasons = {
            errno.EADDRINUSE: f"port {port} of {host} is in use; name another, or 0 for a free one",
            errno.EADDRNOTAVAIL: f"host {host} is no address of this machine; name one, or 0.0.0.0 for all of them",
            errno.EACCES: f"port {port} of {host} is for the administrator; name one from 1024 on",
        }
        if error.errno in reasons:
            raise OptionError(reasons[error.errno]) from error


def _check_on_cpu(what: str, place: EnginePlace, config: EngineConfig) -> None:
    """Check that nothing is given that only one engine in one process can use.

    Raises:
        OptionError: something is.
    """
    if place.device is not None or place.device_memory is not None:
        raise OptionError(f"--device and --device-memory are for one process: leave them out with {what}, on a CPU")
    if any(one is not None for one in (place.memory, place.disk, config.chunk_store, config.cache_dir)):
        raise OptionError(
            f"--memory, --disk, --chunk-store and --cache-dir are those of one engine: leave them out with {what}"
        )


def name_of(model: str) -> str:
    """Return a model's name for clients.

    It is a hub id or a name as it is, a folder by its last part, a GGUF file by its stem.

    Example:
        >>> name_of("pond-recall")
        'pond-recall'
    """
    path = Path(model)
    if path.suffix.lower() == ".gguf":
        return path.stem
    return path.resolve().name if path.is_dir() else model


#: Addresses that stand for every one of a machine.
_EVERY = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def summary(llm: ServedLLM, settings: ServerSettings, host: str, port: int) -> list[str]:
    """Return the lines that a server prints when it listens.

    Args:
        llm: The model.
        settings: Settings of the server.
        host: Address on which it listens.
        port: Port that it has.
    """
    stats, cache = llm.stats(), llm.cache
    own = _EVERY.get(host, host)
    address = f"http://{f'[{own}]' if ':' in own else own}:{port}"
    weights = f", {size(stats.weight_bytes)} of weights" if stats.weight_bytes else ""
    room = "no limit (--kv-memory)" if stats.kv_limit is None else f"at most {size(stats.kv_limit)}"
    kept = [f"method {cache.method}" if cache.method else "", f"budget {cache.budget}" if cache.budget else ""]
    kept += [f"format {cache.codec or 'of the model'}"]
    keys = f"one of {len(settings.api_keys)} is needed" if settings.api_keys else "none is needed"
    everywhere = ", and at every other address of this machine" if host in _EVERY else ""
    return [
        f"model    {llm.model_name}{weights}, context of {llm.context_length:,} tokens",
        f"cache    {', '.join(part for part in kept if part)}; memory for keys and values: {room}",
        f"OpenAI   {address}/v1{everywhere}",
        f"others   {address} (Anthropic's clients, llama.cpp's /infill; /openapi.json describes all)",
        f"page     {address}/",
        f"turns    {_stored_turns(llm)}",
        f"key      {keys}",
    ]


def _stored_turns(llm: ServedLLM) -> str:
    """Return what is said of the turns of chats that are kept on a disk."""
    if llm.sessions is None:
        return "none are stored (--cache-dir)"
    stats = llm.sessions.stats()
    return f"{size(stats.disk_bytes)} stored, of at most {size(stats.disk_limit)}"


def show_log(requests: bool) -> None:
    """Write warnings and errors to stderr from now on, with their time.

    Args:
        requests: Write a line per request, too.
    """
    from millpond.server.request_log import LOG

    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    logging.getLogger("millpond").handlers[:] = [lines]
    if requests:
        LOG.setLevel(logging.INFO)
