"""The model for lm-evaluation-harness: the same numbers as our harness on the same data."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from millpond.cli.app import app
from millpond.errors import DataError, MillpondError, OptionError
from millpond.install_command import install_command
from millpond_lab.cli.lm_eval import with_device, with_model
from millpond_lab.evals.adapters.asked import greedy_question
from millpond_lab.evals.sample import Sample
from tests.helpers.evals.small import TinyTask, examined, save_tiny, tiny_model, tiny_samples, tiny_tokenizer, with_stop

needed = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-evaluation-harness is not installed (the extra lm-eval)"
)
STOP = "w5"


def one_question_each() -> tuple[Sample, ...]:
    """With the answers of the full cache as references, so that scores are neither all 0 nor all 1."""
    samples = with_stop(tuple(replace(s, questions=s.questions[:1]) for s in tiny_samples(6)), STOP)
    said = [r.answer for r in examined(TinyTask(items=samples), "full")]
    return tuple(
        replace(s, questions=(replace(s.questions[0], references=(text if i % 3 else "nothing",)),))
        for i, (s, text) in enumerate(zip(samples, said, strict=True))
    )


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    return importlib.import_module("millpond_lab.evals.adapters.lm_eval")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two tasks as lm-eval's users write them: YAML beside JSONL."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [
        {
            "text": s.context + s.questions[0].text,
            "choices": list(s.questions[0].choices),
            "right": s.questions[0].right,
            "answer": s.questions[0].references[0],
        }
        for s in one_question_each()
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\ntest_split: test\n"
    (tmp_path / "pond_choice.yaml").write_text(
        f"task: pond_choice\n{data}output_type: multiple_choice\n"
        'doc_to_text: "{{text}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: "{{right}}"\n'
        "metric_list: [{metric: acc}, {metric: acc_norm}]\n"
    )
    (tmp_path / "pond_say.yaml").write_text(
        f"task: pond_say\n{data}output_type: generate_until\n"
        'doc_to_text: "{{text}}"\ndoc_to_target: "{{answer}}"\n'
        f"generation_kwargs: {{until: [{STOP}], max_gen_toks: 6, do_sample: false}}\n"
        "metric_list: [{metric: exact_match}]\n"
    )
    return tmp_path


def request(*arguments: Any) -> Any:
    from lm_eval.api.instance import Instance

    return Instance("loglikelihood", {}, arguments, 0)


@needed
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("method", "budget", "size"), [("full", "", 1), ("h2o", "30%", 4), ("h2o:recent=0.25", "9", 2)]
)
def test_a_local_task_gives_the_numbers_of_our_harness(
    door: Any, folder: str, tasks: Path, method: str, budget: str, size: int
) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    arguments = {"pretrained": folder, "method": method, **({"budget": budget} if budget else {}), "device": "cpu"}
    result = simple_evaluate(
        model="millpond",
        model_args=arguments,
        tasks=["pond_choice", "pond_say"],
        batch_size=size,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )
    items = one_question_each()
    chosen = examined(TinyTask("choice", items), method, budget)
    assert result["results"]["pond_choice"]["acc,none"] == pytest.approx(sum(r.score for r in chosen) / 6)
    assert result["results"]["pond_choice"]["acc_norm,none"] == pytest.approx(
        sum(r.extra["acc_norm"] for r in chosen) / 6
    )
    said = examined(TinyTask(items=items), method, budget)
    right = [r.answer == s.questions[0].references[0] for r, s in zip(said, items, strict=True)]
    assert result["results"]["pond_say"]["exact_match,none"] == pytest.approx(sum(right) / 6)
    responses = [sample["resps"][0][0] for sample in result["samples"]["pond_say"]]
    assert responses == [r.answer for r in said]
    assert result["config"]["kv_bytes"] == pytest.approx(sum(r.kv_bytes for r in said) / 6, rel=0.02)
    assert result["config"]["kept_share"] == pytest.approx(sum(r.kept_share for r in said) / 6)
    assert result["config"]["method"] == method


@needed
@pytest.mark.filterwarnings("ignore")
def test_the_full_cache_gives_what_lm_eval_finds_by_itself(door: Any, folder: str) -> None:
    """Its own Hugging Face backend, one forward pass without any cache."""
    from lm_eval.models.huggingface import HFLM

    own = HFLM(pretrained=tiny_model(), tokenizer=tiny_tokenizer(), backend="causal")
    ours = door.MillpondLM(folder, "full", device="cpu", batch_size=3)
    context = tiny_samples(1)[0].context
    pairs = [request(context, " w7 w8 w9"), request(context, " w11"), request("w4 w9 ", "w3 w5"), request("", "w3 w8")]
    for (want, want_greedy), (got, greedy) in zip(own.loglikelihood(pairs), ours.loglikelihood(pairs), strict=True):
        assert got == pytest.approx(want, abs=1e-5)  # the other one computes in float32 at its end
        assert greedy == want_greedy


@needed
def test_a_whole_text_is_fed_token_by_token_in_windows(door: Any, folder: str) -> None:
    text = " ".join(s.context for s in tiny_samples(2))
    ids = torch.tensor([tiny_tokenizer()(text)["input_ids"]])
    with torch.inference_mode():
        logprobs = tiny_model()(ids).logits[0, :-1].log_softmax(-1)
    want = float(logprobs.gather(1, ids[0, 1:, None]).sum())
    full = door.MillpondLM(folder, "full", device="cpu")
    assert full.loglikelihood_rolling([request(text)])[0] == pytest.approx(want, abs=1e-8)
    half = door.MillpondLM(folder, "h2o", "50%", device="cpu").loglikelihood_rolling([request(text)])[0]
    whole = door.MillpondLM(folder, "h2o", "100%", device="cpu").loglikelihood_rolling([request(text)])[0]
    assert whole == pytest.approx(want, abs=1e-8)
    assert half != pytest.approx(want, abs=1e-3)
    short = door.MillpondLM(folder, "full", device="cpu", max_length=20).loglikelihood_rolling([request(text)])[0]
    assert short != pytest.approx(want, abs=1e-3)
    with pytest.raises(OptionError, match="every token is decoded"):
        door.MillpondLM(folder, "snapkv", "50%", device="cpu").loglikelihood_rolling([request(text)])


@needed
def test_what_does_not_fit_is_refused_or_cut_where_that_was_asked_for(door: Any, folder: str) -> None:
    long = request(" ".join(["w7"] * 30), " w8")
    with pytest.raises(OptionError, match="31 tokens, with 1 to follow, is longer than the model's 20 positions"):
        door.MillpondLM(folder, "full", device="cpu", max_length=20).loglikelihood([long])
    cut = door.MillpondLM(folder, "full", device="cpu", max_length=20, truncate=True)
    with pytest.warns(door.CutShortWarning, match="longer than 20 tokens is cut"):
        assert cut.loglikelihood([long])[0][0] < 0
    with pytest.raises(DataError, match="no tokens"):
        cut.loglikelihood([request("w4", "")])
    with pytest.warns(door.CutShortWarning, match="1 answers did not end"):
        door.MillpondLM(folder, "full", device="cpu", max_length=20).generate_until(
            [request("w4 w5 w6", {"until": [], "max_gen_toks": 60})]
        )


@needed
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"method": "h20"}, "did you mean 'h2o'"),
        ({"recen": 0.5}, "did you mean 'recent'"),
        ({"budget": "lots"}, "is not a budget"),
        ({"method": "full", "budget": "20%"}, "takes no budget"),
        ({"batch_size": "auto"}, "batch_size='auto'"),
        ({"max_length": 0}, "max_length=0"),
    ],
)
def test_mistakes_in_model_args_are_typed(door: Any, folder: str, arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(MillpondError, match=match):
        door.MillpondLM(**{"pretrained": folder, "device": "cpu", **arguments})


@needed
def test_numbers_of_a_command_line_are_understood(door: Any, folder: str) -> None:
    model = door.MillpondLM.create_from_arg_obj(
        {"pretrained": folder, "method": "h2o", "budget": 0.25, "recent": 0.5, "sinks": 0}, {"device": "cpu"}
    )
    assert model.budget == "25%"
    assert model.get_model_info()["sinks"] == 0


def test_greedy_arguments() -> None:
    asked = greedy_question({"until": ["a", ""], "max_new_tokens": 3, "do_sample": False, "temperature": 0.7})
    assert (asked.stop, asked.max_new_tokens) == (("a",), 3)
    assert greedy_question({"temperature": 0.0, "top_p": 1.0}).max_new_tokens == 256


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"do_sample": True}, "decoded greedily"),
        ({"temperature": 0.7}, "temperature=0.7"),
        ({"do_sample": False, "num_beams": 4}, "num_beams=4"),
        ({"best_of": 2}, "'best_of' is not known"),
        ({"max_gen_toks": 0}, "at least 1"),
    ],
)
def test_sampling_is_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        greedy_question(arguments)


def test_the_command_names_the_model_where_nobody_does() -> None:
    assert with_model(["run", "--tasks", "a"]) == ["run", "--model", "millpond", "--tasks", "a"]
    assert with_model(["--model", "hf"]) == ["--model", "hf"]
    assert with_model(["ls", "tasks"]) == ["ls", "tasks"]


@needed
@pytest.mark.slow  # lm-eval reads its own thousands of tasks first
@pytest.mark.filterwarnings("ignore")
def test_the_command_runs_a_local_task(door: Any, folder: str, tasks: Path) -> None:
    result = CliRunner().invoke(
        app,
        [
            "lm-eval",
            "--model_args",
            f"pretrained={folder},method=h2o,budget=30%",
            "--tasks",
            "pond_say",
            "--device",
            "cpu",
            "--include_path",
            str(tasks),
            "--output_path",
            str(tasks / "out"),
            "--log_samples",
        ],
    )
    assert result.exit_code == 0, result.output + str(result.exception)
    (written,) = (tasks / "out").rglob("results_*.json")
    assert json.loads(written.read_text())["config"]["kept_share"] == pytest.approx(0.3, abs=0.02)


def test_without_the_extra_one_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    result = CliRunner().invoke(app, ["lm-eval", "--tasks", "a"])
    assert result.exit_code == 2
    assert install_command("lm-eval") in " ".join(result.stderr.split())


def test_without_cuda_an_evaluation_runs_on_the_cpu_unless_it_says_otherwise() -> None:
    tasks = ["--tasks", "piqa"]
    assert with_device(tasks, has_cuda=False) == [*tasks, "--device", "cpu"]
    assert with_device(tasks, has_cuda=True) == tasks
    for given in (
        [*tasks, "--device", "cuda:1"],
        [*tasks, "--device=cpu"],
        ["--config", "a.yaml"],
        ["ls", "tasks"],
        [],
    ):
        assert with_device(given, has_cuda=False) == given
