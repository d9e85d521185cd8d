"""Schedulers without workers: groups of blocks as a test wants them, and outputs that a test makes up."""

from typing import Any

from vllm_helpers.engines import need_vllm


def full_spec(block: int = 16, **changes: Any) -> Any:
    """Return the specification of full-attention layers that evict."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from millpond_vllm.block_manager import EvictingSpec

    given = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.float32, **changes}
    return EvictingSpec.of(FullAttentionSpec(block_size=block, **given))


def sliding_spec(block: int = 16, window: int = 64) -> Any:
    """Return the specification of sliding-window layers."""
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return SlidingWindowSpec(block_size=block, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=window)


def recurrent_spec(block: int = 64, mode: str = "align") -> Any:
    """Return the specification of recurrent layers."""
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(block_size=block, shapes=((64, 64),), dtypes=(torch.float32,), mamba_cache_mode=mode)


class Steps:
    """A scheduler whose steps a test computes: each sampled token is the next number.

    Args:
        model: Path of a model, for its configuration alone.
        settings: Settings of `engine_args`.
        groups: Specifications of the groups of blocks.
        blocks: Blocks of the pool, the null block among them.
        ahead: Take the asynchronous scheduler, and schedule one step ahead of the outputs.
        batch: Tokens of a step.
    """

    def __init__(
        self,
        model: str,
        settings: dict[str, Any],
        groups: list[Any],
        blocks: int,
        *,
        ahead: bool = False,
        batch: int = 4096,
        **args: Any,
    ) -> None:
        need_vllm()
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        import millpond_vllm
        from millpond_vllm import scheduler

        given = {
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "max_model_len": 4096,
            "enforce_eager": True,
            "block_size": groups[0].block_size,
            "max_num_batched_tokens": batch,
            **millpond_vllm.engine_args(**settings),
            **args,
        }
        config = EngineArgs(model=model, **given).create_engine_config()
        config.cache_config.num_gpu_blocks = blocks
        config.scheduler_config.async_scheduling = ahead
        for spec in groups:  # vLLM takes it from the model, and this one has no recurrent layers
            config.cache_config.mamba_cache_mode = getattr(spec, "mamba_cache_mode", "none")
        named = [KVCacheGroupSpec([f"layer{index}"], spec) for index, spec in enumerate(groups)]
        cache = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=named,
            prefix_cache_retention_interval=config.cache_config.prefix_cache_retention_interval
            if len({type(spec) for spec in groups}) > 1
            else None,
        )
        block, hashed = resolve_kv_cache_block_sizes(cache, config)
        kind = scheduler.MillpondAsyncScheduler if ahead else scheduler.MillpondScheduler
        self.scheduler = kind(config, cache, StructuredOutputManager(config), block, hashed)
        self.ahead = ahead
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(hashed, sha256)
        self._sampled = 1000
        self._in_flight: list[Any] = []
        self.outputs: list[Any] = []
        self.tokens: dict[str, list[int]] = {}

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def add(self, name: str, ids: list[int], new: int = 8, priority: int = 0, **asked: Any) -> Any:
        """Add a request with its own settings, and return it."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        if asked:
            params.extra_args = {"millpond": asked}
        request = Request(name, ids, params, None, priority=priority, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        self.tokens[name] = []
        return request

    def step(self) -> Any:
        """Schedule one step, and give back the output of this one or, one step ahead, of the one before."""
        output = self.scheduler.schedule()
        self.outputs.append(output)
        self._in_flight.append(output)
        if not self.ahead or len(self._in_flight) > 1 or not output.total_num_scheduled_tokens:
            self._finish(self._in_flight.pop(0))
        return output

    def run(self, most: int = 200) -> int:
        """Take steps until no request is left; return how many they were."""
        for count in range(most):
            if not self.scheduler.has_requests():
                return count
            self.step()
        raise AssertionError(f"requests are left after {most} steps")

    def evictions(self, name: str) -> list[Any]:
        """Return the orders to evict from one request so far."""
        from millpond_vllm import compat

        return [one for output in self.outputs for one in compat.orders_of(output).evictions if one.request == name]

    def _finish(self, output: Any) -> None:
        """Give the scheduler the tokens of a step: one for each request whose prompt is read."""
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self.scheduler.requests.get(name)
            ends = request is not None and not _inside(output, name, request)
            sampled.append([self._next()] if ends else [])
        made = ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, sampled)
        for part in self.scheduler.update_from_output(output, made).values():
            for one in part.outputs:
                self.tokens[one.request_id].extend(one.new_token_ids)

    def _next(self) -> int:
        self._sampled += 1
        return self._sampled % 500


def _inside(output: Any, name: str, request: Any) -> bool:
    """Whether a step of a request ended inside its prompt, by what the step itself says."""
    new = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    known = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    begin = new.get(name, known.get(name, 0))
    return begin + output.num_scheduled_tokens[name] < request.num_prompt_tokens
