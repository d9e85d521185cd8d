"""Names of Millpond's models in the arguments of `vllm serve`; they need no vLLM."""

import pytest

from millpond import OptionError
from millpond.models.load import resolve
from millpond_vllm.cli.model_name import with_model_folder

FOLDER = resolve("pond-recall")
SERVED = ["--served-model-name", "pond-recall"]


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        (["pond-recall", "-tp", "2"], [FOLDER, "-tp", "2", *SERVED]),
        (["--port", "1", "--model", "pond-recall"], ["--port", "1", "--model", FOLDER, *SERVED]),
        (["--model=pond-recall"], [f"--model={FOLDER}", *SERVED]),
        (["pond-recall", "--served-model-name", "mine"], [FOLDER, "--served-model-name", "mine"]),
        (["pond-recall", "--served_model_name=mine"], [FOLDER, "--served_model_name=mine"]),
        (["Qwen/Qwen3-8B", "--seed=3"], ["Qwen/Qwen3-8B", "--seed=3"]),
        (["--tokenizer", "pond-recall"], ["--tokenizer", "pond-recall"]),
        (["--model"], ["--model"]),
        ([], []),
    ],
)
def test_a_name_becomes_the_folder_of_the_model(given, becomes):
    assert with_model_folder(given) == becomes


def test_a_folder_of_that_name_comes_first(tmp_path, monkeypatch):
    (tmp_path / "pond-recall").mkdir()
    monkeypatch.chdir(tmp_path)
    assert with_model_folder(["pond-recall"]) == ["pond-recall"]


def test_a_model_that_is_not_here_is_told_how_to_get(tmp_path, monkeypatch):
    monkeypatch.setenv("MILLPOND_CACHE", str(tmp_path))
    with pytest.raises(OptionError, match="millpond models get smollm2-135m"):
        with_model_folder(["smollm2-135m"])
