"""`millpond-vllm check` and `trial` as a user runs them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_helpers.engines import need_vllm
from vllm_helpers.models import prompts, tiny_llama

need_vllm()
from vllm_helpers.servers import SMALL, environment  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("commands"))


def run(*arguments):
    command = [sys.executable, "-m", "millpond_vllm", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)


def test_check_says_what_works(tiny):
    done = run("check", tiny, *SMALL, "--method", "h2o")
    assert done.returncode == 0, done.stderr[-2000:]
    for line in ("0.32.0 (tested)", "3 full_attention", "100%", "every query of a prompt is needed", "works:"):
        assert line in done.stdout, line


def test_check_refuses_what_the_engine_would_refuse(tiny):
    connector = json.dumps({"kv_connector": "ExampleConnector", "kv_role": "kv_both"})
    done = run("check", tiny, *SMALL, "--kv-transfer-config", connector)
    assert done.returncode == 1
    assert "refused: millpond: a KV connector or offloader" in done.stdout


def test_a_trial_compares_settings_with_stock(tiny, tmp_path):
    log, out = tmp_path / "log.jsonl", tmp_path / "rows.jsonl"
    lines = [{"prompt": prompt, "max_tokens": 8} for prompt in prompts(6, 150, 400)]
    log.write_text("\n".join(map(json.dumps, lines)))
    small = ["--skip-tokenizer-init", "--max-model-len", "512", "--num-gpu-blocks-override", "30"]
    arguments = [str(log), tiny, *SMALL, *small, "--out", str(out)]
    done = run("trial", *arguments, "--setting", "snapkv:100%", "--setting", "snapkv:20%")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    stock, whole, least = (json.loads(line) for line in Path(out).read_text().splitlines())
    assert stock["tokens"] == whole["tokens"] != least["tokens"]
    assert (stock["freed_tokens"], whole["freed_tokens"]) == (0, 0)
    assert least["freed_tokens"] > 0.4 * least["prompt_tokens"]
    assert least["at_once"] > stock["at_once"]
    assert "smallest setting that reaches 90%: snapkv:100%" in done.stdout
    again = run("trial", *arguments, "--setting", "snapkv:20%", "--target", "0")
    assert "snapkv:20% ..." not in again.stderr
    assert "smallest setting that reaches 0%: snapkv:20%" in again.stdout
