"""Servers of vLLM as a user starts them: processes, and HTTP."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SMALL = ["--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-model-len", "2048"]


def add_tokenizer(folder: str) -> None:
    """Write a tokenizer whose words are w0 to w511, with a chat template, beside a model."""
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(512)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")
    tokenizer.chat_template = "{% for m in messages %}w1 {{ m['content'] }} w2 {% endfor %}"
    tokenizer.save_pretrained(folder)


def installed(folder: Path, own: Path) -> str:
    """Return the PYTHONPATH with which this package counts as installed, entry points and all."""
    import tomllib

    project = tomllib.loads((own / "pyproject.toml").read_text())["project"]
    info = folder / "millpond_vllm-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: millpond-vllm\nVersion: 0.1.0\n")
    lines = []
    for group, names in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in names.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return os.pathsep.join([str(folder), *sys.path])


def environment(python_path: str | None = None) -> dict[str, str]:
    """Return the environment of a process that starts vLLM; one thread, because tests run beside each other."""
    path = os.pathsep.join(sys.path) if python_path is None else python_path
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MILLPOND_VLLM_CHECK_BLOCKS": "1"}


@contextmanager
def server(model: str, *arguments: str, log: Path, python_path: str | None = None) -> Iterator[httpx.Client]:
    """Start `millpond-vllm serve`, and yield a client of it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "millpond_vllm", "serve", model, "--port", port, *arguments]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment(python_path))
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
            begin = time.monotonic()
            while not _is_up(client):
                assert process.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() - begin < 900, log.read_text()[-4000:]
                time.sleep(1)
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


def _is_up(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False
