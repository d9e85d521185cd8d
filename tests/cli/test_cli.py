"""The command line: every command, its errors with suggestions, its exit codes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner, Result

import millpond
from millpond.cli import options as model_options
from millpond.cli.app import app
from millpond.cli.console import size
from millpond.models.load import load_model, resolve
from millpond_lab.pond.words import VOCABULARY

COMMANDS = [
    [],
    ["generate"],
    ["demo"],
    ["methods"],
    ["codecs"],
    ["remember"],
    ["ask"],
    ["bench"],
    ["bench", "kernels"],
    ["bench", "generate"],
    ["train"],
    ["train", "recall"],
]
FILLER = "go on and off past stone " * 40


def call(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin, env={"COLUMNS": "160", "NO_COLOR": "1"})


def right(*arguments: str, stdin: str | None = None) -> Result:
    result = call(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.output + str(result.exception)
    return result


def wrong(*arguments: str) -> str:
    """What a refused command says; exit status 2, one sentence, no traceback."""
    result = call(*arguments)
    assert result.exit_code == 2, result.output + str(result.exception)
    assert "Traceback" not in result.output
    return result.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random model with the bundled tokenizer, saved; it has no chat template."""
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(resolve("pond-recall")) / name, path)
    return str(path)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_is_there_for_every_command(command: list[str]) -> None:
    text = right(*command, "--help").stdout
    assert "Usage:" in text
    assert "--help" in text


def test_version() -> None:
    assert right("--version").stdout == f"millpond {millpond.__version__}\n"


def test_module_is_the_same_program() -> None:
    done = subprocess.run([sys.executable, "-m", "millpond", "codecs"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == millpond.list_codecs()


def test_an_error_of_the_program_goes_to_stderr_with_status_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "millpond", "methods", "h20"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean 'h2o'?" in done.stderr


def test_methods_lists_all_with_their_papers() -> None:
    text = right("methods").stdout
    for name in millpond.list_methods():
        assert f"\n{name} " in text
    assert "arXiv:2306.14048" in text


@pytest.mark.in_turns(0, of=3)
@pytest.mark.parametrize("name", millpond.list_methods())
def test_methods_shows_one(name: str) -> None:
    from millpond.methods import METHODS

    text = right("methods", name).stdout
    for option in METHODS.get(name).options.values():
        assert f"\n{option.name} " in text
        assert str(option.default) in text


def test_codecs() -> None:
    assert right("codecs").stdout.split() == millpond.list_codecs()


def test_generate_streams_text_and_closes_with_numbers(folder: str) -> None:
    result = right("generate", "--model", folder, "--prompt", FILLER, "--max-new-tokens", "5", "--budget", "25%")
    assert 1 <= len(result.stdout.split()) <= 5
    line = result.stderr.strip().splitlines()[-1]
    for part in ("prompt 241 tokens at", "5 new at", "tokens/s", " held, ", "full cache", "%"):
        assert part in line


def continued(folder: str, *options: str) -> str:
    """What `millpond generate` writes after FILLER."""
    return str(right("generate", "--model", folder, "--prompt", FILLER, *options).stdout)


def test_generate_is_what_python_gives(folder: str) -> None:
    from millpond.models.load import load_tokenizer

    model, tokenizer = load_model(folder), load_tokenizer(folder)
    with millpond.compress(model, "h2o", 64, recent=0.25) as cache:
        inputs = tokenizer(FILLER, return_tensors="pt")
        out: Any = model.generate(**inputs, cache=cache, max_new_tokens=6, do_sample=False)  # type: ignore[operator]
    said = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    told = continued(folder, "--max-new-tokens", "6", "--budget", "64", "-o", "recent=0.25")
    assert told.split() == said.split()


@pytest.mark.parametrize(
    "options",
    [
        ["--method", "full"],
        ["--method", "window", "--budget", "32", "--chunk", "50"],
        ["--method", "snapkv", "--budget", "64", "--option", "window=16", "-o", "decode=evict"],
        ["--codec", "bf16", "--page-slots", "16", "--budget", "256KiB"],
        ["--temperature", "0.8", "--top-k", "20", "--top-p", "0.9", "--seed", "3"],
        ["--temperature", "0.8", "--typical-p", "0.5", "--min-new-tokens", "4"],
        ["--dtype", "bf16", "--device", "cpu", "--memory-limit", "64MiB", "--no-chat"],
    ],
    ids=lambda options: options[1],
)
def test_generate_takes(folder: str, options: list[str]) -> None:
    continued(folder, "--max-new-tokens", "4", *options)


def test_generate_draws_the_same_under_the_same_seed(folder: str) -> None:
    arguments = ["--max-new-tokens", "8", "--temperature", "1", "--seed"]
    first, again, other = (continued(folder, *arguments, seed) for seed in ("1", "1", "2"))
    assert first == again != other


def test_generate_never_writes_a_bad_word(folder: str) -> None:
    common = ["generate", "--model", folder, "--prompt", FILLER, "--max-new-tokens", "6"]
    free = right(*common).stdout.split()
    words = [part for word in set(free) for part in ("--bad-word", word)]
    assert not set(free) & set(right(*common, *words).stdout.split())


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_generate_with_packed_weights_is_what_python_gives(weights: str, tmp_path: Path) -> None:
    import millpond as mp

    model = "pond-recall"
    prompt = "anna kettle " + FILLER + "<ask> anna <is>"
    cache: dict[str, Any] = {"method": "h2o", "budget": "50%"}
    with mp.LLM(model, weights=weights, **cache) as llm:
        params = mp.SamplingParams(max_tokens=4, temperature=0, seed=0)
        said = llm.generate([prompt], params)[0].completions[0].text
    common = ["generate", "--model", model, "--prompt", prompt, "--max-new-tokens", "4", "--budget", "50%"]
    result = right(*common, "--weights", weights, "--page-slots", "16", "--memory-limit", "64MiB")
    assert result.stdout.strip() == said.strip() != ""
    for part in ("prompt ", " tokens", " new tokens at", " held, "):
        assert part in result.stderr.strip().splitlines()[-1]
    limited = right(*common, "--weights", weights, "--memory", "1GiB", "--disk", str(tmp_path))
    assert limited.stdout == result.stdout
    assert [path.suffix for path in tmp_path.iterdir()] == [".weights"]


def test_generate_reads_files_and_standard_input(folder: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(FILLER, encoding="utf-8")
    common = ["generate", "--model", folder, "--max-new-tokens", "3"]
    from_text = right(*common, "--prompt", FILLER).stdout
    assert right(*common, "--prompt-file", str(file)).stdout == from_text
    assert right(*common, "--prompt-file", "-", stdin=FILLER).stdout == from_text


def test_generate_with_the_bundled_model_and_its_chat_template() -> None:
    prompt = ["--prompt", "anna kettle " + FILLER + "<ask> anna <is>", "--max-new-tokens", "2", "--method", "full"]
    assert right("generate", *prompt).stdout == right("generate", *prompt, "--no-chat").stdout


def test_notes_are_one_sentence(folder: str) -> None:
    text = right("generate", "--model", folder, "--prompt", "go on", "--max-new-tokens", "2", "--budget", "1%").stderr
    assert text.count("note:") == 1
    assert "fewer than" in text


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--prompt", "x", "--method", "snap"], "unknown method 'snap'; did you mean 'snapkv'?"),
        (["--prompt", "x", "-o", "recnt=1"], "unknown option of h2o 'recnt'; did you mean 'recent'?"),
        (["--prompt", "x", "-o", "recent=much"], "h2o: recent='much' is not a valid int or float"),
        (["--prompt", "x", "-o", "reduce=median"], "must be one of 'mean', 'max', 'sum'"),
        (["--prompt", "x", "-o", "recent"], "must read name=value"),
        (["--prompt", "x", "-o", "sinks=1", "-o", "sinks=2"], "given twice"),
        (["--prompt", "x", "--codec", "bf61"], "unknown codec 'bf61'; did you mean 'bf16'?"),
        (["--prompt", "x", "--dtype", "f23"], "unknown dtype 'f23'; did you mean 'f32'?"),
        (["--prompt", "x", "--budget", "lots"], "budget 'lots' is not a budget"),
        (["--prompt", "x", "--budget", "2", "-o", "recent=4"], "budget 2 is smaller than sinks 4 + recent 4"),
        (["--prompt", "x", "--budget", "10b"], "raise the budget or lower page_slots"),
        (["--prompt", "x", "--method", "full", "--budget", "20%"], "keeps everything and takes no budget"),
        (["--prompt", "x", "--chat"], "no chat template"),
        (["--prompt", "x", "--page-slots", "3"], "must be a power of two"),
        (["--prompt", "x", "--temperature", "-1"], "must not be negative"),
        (["--prompt", "x", "--top-k", "5"], "no effect at temperature 0"),
        (["--prompt", "x", "--temperature", "1", "--top-p", "0"], "must lie in (0, 1]"),
        (["--prompt", "x", "--temperature", "1", "--typical-p", "2"], "must lie in (0, 1]"),
        (["--prompt", "x", "--min-new-tokens", "200"], "--min-new-tokens 200 is more than --max-new-tokens 128"),
        (["--prompt", "x", "--bad-word", " "], "bad_words holds ' '"),
        (["--prompt", FILLER, "--memory-limit", "8KiB", "--method", "full"], "the page pool is full"),
        (["--prompt", "x", "--device", "gpu"], "--device gpu: torch cannot use it here"),
        (["--prompt", " "], "the prompt is empty"),
        (["--prompt", "x", "--weights", "int5"], "unknown format of weights 'int5'; did you mean 'int"),
        (["--prompt", "x", "--weights", "int4", "--chunk", "8"], "--chunk 8: with --weights prompts are read"),
        (["--prompt", "x", "--weights", "int4", "--device", "cuda"], "--device cuda: --disk and --weights run on a"),
        (["--prompt", "x", "--disk", "."], "disk= belongs to memory= or plan="),
        (["--prompt-file", "no-such-file"], "cannot be read"),
        (["--prompt", "x", "--prompt-file", "y"], "either as --prompt"),
        ([], "either as --prompt"),
    ],
    ids=lambda value: " ".join(value)[-30:] if isinstance(value, list) else "",
)
def test_generate_refuses(folder: str, options: list[str], sentence: str) -> None:
    assert sentence in wrong("generate", "--model", folder, *options)


def test_a_mistyped_bundled_model_does_not_ask_the_hub() -> None:
    assert "did you mean 'pond-recall'?" in wrong("generate", "--model", "pond-recal", "--prompt", "x")


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    assert "is neither a folder with a model" in wrong("generate", "--model", str(tmp_path), "--prompt", "x")


def test_an_unknown_command_is_refused() -> None:
    assert "demo" in wrong("dem")


def test_demo_shows_a_table_and_draws_a_picture(tmp_path: Path) -> None:
    text = right(
        "demo", "--out", str(tmp_path), "--length", "256", "--questions", "8", "--methods", "full,h2o,window"
    ).stdout
    rows = {line.split()[0]: line.split() for line in text.splitlines() if "%" in line and " of 8 " in line}
    assert set(rows) == {"full", "h2o", "window"}
    assert int(rows["full"][1]) >= int(rows["h2o"][1]) > int(rows["window"][1])
    flat = " ".join(text.split())
    assert "before any question is seen" in flat
    assert f"h2o answers {rows['h2o'][1]} of 8 and window {rows['window'][1]}" in flat
    picture = tmp_path / "kept-positions.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000
    assert str(picture) in text


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--methods", "full,h20"], "did you mean 'h2o'?"),
        (["--questions", "40"], "answers 1 to 32"),
        (["--budget", "none"], "is not a budget"),
    ],
)
def test_demo_refuses(tmp_path: Path, options: list[str], sentence: str) -> None:
    assert sentence in wrong("demo", "--out", str(tmp_path), "--length", "128", *options)


def test_bench_kernels_writes_json_and_markdown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from millpond_lab.bench.kernels import attention, quantized_decode, shared_prefix

    rows = [
        attention.KernelRow("read bandwidth", 1.0, 40.0, 1.0, "itself"),
        attention.KernelRow("bf16 flat", 2.0, 30.0, 0.75, "reading"),
    ]
    monkeypatch.setattr(attention, "kernel_table", lambda rounds: rows)
    monkeypatch.setattr(shared_prefix, "BATCH", 3)
    monkeypatch.setattr(shared_prefix, "LENGTH", 64)
    monkeypatch.setattr(shared_prefix, "HEADS", {"GQA 2:1": (2, 2, 16)})
    monkeypatch.setattr(quantized_decode, "codec_table", lambda rounds: rows[1:])
    right("bench", "kernels", "--rounds", "1", "--out", str(tmp_path))
    data = json.loads((tmp_path / "kernels.json").read_text())
    assert data["results"][1]["share"] == 0.75
    assert [row["name"] for row in data["results"][2:5]] == [f"3 x 64, GQA 2:1, {n}% shared" for n in (0, 50, 100)]
    assert data["results"][5]["name"] == "bf16 flat"
    assert data["machine"]["cores"] >= 1
    assert "| bf16 flat | 2.000 | 30.0 | 75% | reading |" in (tmp_path / "kernels.md").read_text()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [(["--cells", "4by5"], "must read BATCHxPROMPT"), (["--budget", "512"], "a share of the prompt")],
)
def test_bench_generate_refuses(options: list[str], sentence: str) -> None:
    assert sentence in wrong("bench", "generate", "--quick", *options)


@pytest.mark.slow
def test_train_recall_takes_a_step(tmp_path: Path) -> None:
    assert "step 1," in right("train", "recall", "--out", str(tmp_path), "--max-steps", "1").stdout
    assert (tmp_path / "config.json").exists()


def test_a_note_without_a_card_is_refused(tmp_path: Path) -> None:
    assert "add --card" in wrong("train", "recall", "--out", str(tmp_path), "--note", "by hand")


def test_sizes_as_people_read_them() -> None:
    assert [size(n) for n in (0, 1023, 1024, 3 * 2**20, 2**41)] == ["0 B", "1023 B", "1.0 KiB", "3.0 MiB", "2048.0 GiB"]


def test_the_device_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU if there is one, unless something is asked for that runs on a CPU."""
    monkeypatch.setattr(model_options, "pick_device", lambda name: torch.device(name or "cuda"))
    assert model_options.device_of_engine(None) == "cuda"
    assert model_options.device_of_engine("cuda:1", None) == "cuda:1"
    assert model_options.device_of_engine("cpu") is None
    assert model_options.device_of_engine(None, None, "int4") is None


@pytest.mark.parametrize("command", ["serve", "chat", "batch"])
def test_a_device_that_is_not_there(command: str) -> None:
    arguments = {"serve": [], "chat": [], "batch": ["requests.jsonl", "--out", "answers.jsonl"]}[command]
    assert "--device cuda:7: torch cannot use it here" in wrong(command, *arguments, "--device", "cuda:7")
