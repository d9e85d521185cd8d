"""llama.cpp for `millpond bench engines`: its own C functions, one batch a step. See engine_child.py.

Runs in an environment of its own (benchmarks/engines/llamacpp_env.sh).
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import llama_cpp as lib
from engine_child import serve

TYPES = {"f16": lib.GGML_TYPE_F16, "q8_0": lib.GGML_TYPE_Q8_0}  #: of keys and values


class LlamaCpp:
    """A context over a file that gguf_model.py made, with a cache for every sequence.

    Settings: model, threads; batch, room: sequences, and entries of each; cache: one of TYPES; step_tokens: of prompts
    in one call; repack: weights may be packed again in memory, by default.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        lib.llama_backend_init()
        lib.llama_log_set(_silent, None)
        how = lib.llama_model_default_params()
        how.use_extra_bufts = settings.get("repack", True)
        model = lib.llama_model_load_from_file(settings["model"].encode(), how)
        if not model:
            raise RuntimeError(f"{settings['model']} cannot be loaded")
        params = lib.llama_context_default_params()
        params.n_ctx = settings["batch"] * (-(-settings["room"] // 256) * 256)
        params.n_seq_max, params.kv_unified = settings["batch"], False
        params.n_batch = settings["step_tokens"]
        params.n_threads = params.n_threads_batch = settings["threads"]
        params.type_k = params.type_v = TYPES[settings["cache"]]
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._context = lib.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError("no context: see the size of its cache")
        self._most, self._weight_bytes = params.n_batch, int(lib.llama_model_size(model))
        self._batch = lib.llama_batch_init(self._most, 0, 1)
        self._greedy = lib.llama_sampler_init_greedy()

    def run(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """One reading: every prompt to its first token, then `new_tokens` steps of all sequences together."""
        lib.llama_memory_clear(lib.llama_get_memory(self._context), False)
        begun = time.perf_counter()
        tokens = [self._read(sequence, prompt) for sequence, prompt in enumerate(prompts)]
        ticks = [time.perf_counter()]
        for step in range(new_tokens):
            rows = [(token, len(prompts[sequence]) + step, sequence, True) for sequence, token in enumerate(tokens)]
            self._decode(rows)
            tokens = [lib.llama_sampler_sample(self._greedy, self._context, row) for row in range(len(rows))]
            ticks.append(time.perf_counter())
        held = sum(lib.llama_state_seq_get_size(self._context, sequence) for sequence in range(len(prompts)))
        steps = [1e3 * (after - before) for before, after in itertools.pairwise(ticks)]
        return {"prefill_s": ticks[0] - begun, "steps_ms": steps, "kv_bytes": held, "weight_bytes": self._weight_bytes}

    def _read(self, sequence: int, prompt: list[int]) -> int:
        """Read a prompt; its first token."""
        rows = [(token, at, sequence, at == len(prompt) - 1) for at, token in enumerate(prompt)]
        for start in range(0, len(rows), self._most):
            self._decode(rows[start : start + self._most])
        return int(lib.llama_sampler_sample(self._greedy, self._context, -1))

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """One batch of (token, position, sequence, whether its logits are wanted)."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[row], batch.pos[row], batch.logits[row] = token, position, wanted
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
        if code := lib.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode answered {code}")


@lib.llama_log_callback
def _silent(_level: int, _text: bytes, _data: Any) -> None:
    """Its reports would only be in the way."""


if __name__ == "__main__":
    serve(f"llama-cpp-python {lib.__version__}", LlamaCpp)
