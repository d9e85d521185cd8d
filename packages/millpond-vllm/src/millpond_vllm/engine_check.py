"""What an engine of vLLM must be for its requests to evict, checked when it starts."""

from __future__ import annotations

from typing import Any

from millpond import OptionError, UnsupportedModelError
from millpond_vllm import compat
from millpond_vllm.settings import KEY, EngineSettings

#: Line that starts vLLM with all that is needed.
USE = "use `millpond-vllm serve MODEL --method snapkv --budget 20%`, or LLM(MODEL, **millpond_vllm.engine_args(...))"


def check_engine(vllm_config: Any) -> EngineSettings:
    """Return the settings of an engine, or refuse it.

    Raises:
        OptionError: no settings, wrong ones, or classes that belong together and are not given together.
        UnsupportedModelError: something of this engine would break or be broken by eviction.
    """
    given = (vllm_config.additional_config or {}).get(KEY)
    if given is None:
        raise OptionError(f"millpond's scheduler and worker need its settings in additional_config; {USE}")
    settings = EngineSettings.parse(given)
    compat.check_version(force=settings.force)
    _check_classes(vllm_config)
    for bad, what in _refusals(vllm_config, settings):
        if bad:
            raise UnsupportedModelError(f"millpond: {what}")
    return settings


def _check_classes(vllm_config: Any) -> None:
    scheduler = str(vllm_config.scheduler_config.scheduler_cls)
    worker = str(vllm_config.parallel_config.worker_cls)
    for name, path in (("scheduler", scheduler), ("worker", worker)):
        if "millpond_vllm" not in path:
            raise OptionError(
                f"millpond's settings are given and the {name} is {path}: its requests would lose what they need; {USE}"
            )


def _refusals(config: Any, settings: EngineSettings) -> list[tuple[bool, str]]:
    parallel, policy = config.parallel_config, settings.policy()
    speculative = config.speculative_config is not None
    return [
        (
            config.model_config.use_mla,
            "this model caches latents (MLA), one entry for all heads; run it without millpond",
        ),
        (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "context parallelism divides the entries of a request among workers, and each would choose alone; use "
            "--tensor-parallel-size",
        ),
        (bool(getattr(parallel, "enable_dbo", False)), "dual-batch overlap reads one step's rows twice; leave it out"),
        (
            config.kv_transfer_config is not None,
            "a KV connector or offloader would store packed blocks under the hashes of the original ones; leave it out",
        ),
        (
            policy.scores_entries and parallel.tensor_parallel_size > 1,
            f"method {settings.method!r} scores an entry by the queries, keys and values of all heads, and each worker "
            "has some of them; use --pipeline-parallel-size, or snapkv",
        ),
        (
            speculative and policy.every_step,
            f"speculative decoding and method {settings.method!r}, which evicts while decoding: rejected drafts would "
            "move its events; give options={'decode': 'grow'}, or leave one out",
        ),
    ]
