"""An installed package that nobody asks for: every class is vLLM's own, and settings alone are refused."""

import subprocess
import sys
from pathlib import Path

import pytest
from vllm_helpers.engines import need_vllm
from vllm_helpers.models import tiny_llama

need_vllm()
from vllm_helpers.servers import SMALL, environment, installed  # noqa: E402

OWN = Path(__file__).parents[1]
ENGINE = """
import sys
import vllm
given = dict(dtype="float32", skip_tokenizer_init=True, max_model_len=1024, enforce_eager=True, block_size=32)
if __name__ == "__main__":
    try:
        vllm.LLM(sys.argv[1], additional_config={"mill" "pond": {"budget": "20%"}}, **given)
    except Exception as error:
        print("refused:", error)
    llm = vllm.LLM(sys.argv[1], **given)
    core = llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    runner = worker.model_runner
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    used = [core.scheduler, worker, runner, *core.scheduler.kv_cache_manager.coordinator.single_type_managers]
    used += [layer.impl for layer in layers] + [layer.get_attn_backend() for layer in layers]
    used += [*runner.input_batch.logitsprocs.all]
    kinds = [one if isinstance(one, type) else type(one) for one in used]
    print("foreign:", [kind for kind in kinds if not kind.__module__.startswith("vllm.")])
    print("classes:", len(kinds))
    ours = [name for name in sys.modules if name.startswith("millpond")]
    print("imported:", sorted(name for name in ours if name.split(".")[-1] in ("scheduler", "worker", "block_manager")))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stock")
    model = tiny_llama(folder / "tiny")
    script = folder / "stock.py"
    script.write_text(ENGINE)
    path = installed(folder / "site", OWN)
    command = [sys.executable, str(script), model]
    env = {**environment(path), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_installed_but_not_asked_for_every_class_is_vllms_own(said):
    assert "foreign: []" in said
    assert int(said.split("classes: ")[1].split()[0]) >= 10
    assert "imported: []" in said


@pytest.mark.slow
def test_settings_alone_are_refused_in_python(said):
    assert "millpond-vllm serve MODEL" in said.split("refused: ")[1].splitlines()[0]


@pytest.mark.slow
def test_settings_alone_are_refused_on_the_command_line(tmp_path):
    run = "import sys; from millpond_vllm.compat import run_serve; run_serve(sys.argv[1:])"
    command = [sys.executable, "-c", run, "some-model", *SMALL, "--additional-config", '{"millpond": {}}']
    env = environment(installed(tmp_path / "site", OWN))
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode != 0
    assert "nothing would be evicted; use `millpond-vllm serve MODEL" in done.stderr
