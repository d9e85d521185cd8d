"""The process of one setting: an engine of vLLM that answers the traffic, and a row of what it did.

    python -m millpond_vllm.trial.child JOB ROW

JOB is a file with the log, the arguments of `vllm serve`, the setting and the hash of the load; ROW is written.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from millpond_vllm import compat
from millpond_vllm.settings import KEY
from millpond_vllm.trial.log import LoggedRequest, read_log
from millpond_vllm.trial.rows import TrialRow


def answer(job: dict[str, Any]) -> TrialRow:
    """Answer the traffic of a job, and return its row."""
    from vllm import SamplingParams

    engine = compat.engine_of(job["arguments"])
    prompts = [_token_ids(engine, one) for one in read_log(Path(job["log"]))]
    requests = [(str(at), *one) for at, one in enumerate(prompts)]
    counts: list[tuple[int, int]] = []
    begin = time.monotonic()
    for name, prompt, most in requests:
        params = SamplingParams(temperature=0, max_tokens=most, detokenize=False)
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    tokens: dict[str, list[int]] = {}
    freed = 0
    while engine.has_unfinished_requests():
        outputs = engine.step()
        counts.append(compat.request_counts(engine))
        for output in outputs:
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
                freed += (output.kv_transfer_params or {}).get(KEY, {}).get("blocks_freed", 0)
    seconds = time.monotonic() - begin
    waited = [running for running, waiting in counts if waiting] or [running for running, _ in counts]
    return TrialRow(
        job["setting"],
        job["load"],
        [tokens[name] for name, *_ in requests],
        sum(len(prompt) for _, prompt, _ in requests),
        seconds,
        sum(waited) / len(waited),
        max(running for running, _ in counts),
        freed * engine.vllm_config.cache_config.block_size,
    )


def _token_ids(engine: Any, request: LoggedRequest) -> tuple[list[int], int]:
    if isinstance(request.prompt, list):
        return request.prompt, request.max_tokens
    tokenizer = engine.get_tokenizer()
    if request.prompt is not None:
        return list(tokenizer(request.prompt)["input_ids"]), request.max_tokens
    text = tokenizer.apply_chat_template(request.messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]), request.max_tokens


def main() -> None:
    """Run the job of the command line."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the requests that run are counted in this process
    job, row = map(Path, sys.argv[1:])
    found = answer(json.loads(job.read_text(encoding="utf-8")))
    row.write_text(json.dumps(asdict(found)), encoding="utf-8")


if __name__ == "__main__":
    main()
