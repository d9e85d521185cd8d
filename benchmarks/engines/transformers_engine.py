"""transformers itself for `millpond bench engines`: its DynamicCache and SDPA attention. See engine_child.py."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
import transformers
from engine_child import serve
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast

#: The argument that takes the cache, renamed in transformers 5.24.
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"


class Transformers:
    """A stock model in bfloat16. Settings: model, threads; step_tokens: of prompts in one pass."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        self._model: Any = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.bfloat16).eval()
        self._step_tokens = settings["step_tokens"]

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """One reading: all prompts to their first tokens, then `new_tokens` steps of all sequences together."""
        ids, cache = torch.tensor(prompts), DynamicCache(config=self._model.config)
        rows = max(1, self._step_tokens // len(prompts))
        begun = time.perf_counter()
        for part in ids.split(rows, dim=1):
            tokens = self._pass(part, cache)
        ticks = [time.perf_counter()]
        for _ in range(new_tokens):
            tokens = self._pass(tokens, cache)
            ticks.append(time.perf_counter())
        layers: Any = cache.layers
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        steps = [1e3 * (after - before) for before, after in itertools.pairwise(ticks)]
        return {"prefill_s": ticks[0] - begun, "steps_ms": steps, "kv_bytes": held}

    def _pass(self, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """The greedy next token of every sequence, (batch, 1)."""
        logits = self._model(ids, logits_to_keep=1, **{CACHE: cache}).logits
        next_tokens: torch.Tensor = logits[:, -1].argmax(-1, keepdim=True)
        return next_tokens


if __name__ == "__main__":
    serve(f"transformers {transformers.__version__}, torch {torch.__version__}", Transformers)
