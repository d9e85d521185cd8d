"""Errors of the command line before vLLM starts; they need no vLLM."""

import json

import pytest
from typer.testing import CliRunner

from millpond_vllm.cli.app import app


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--method", "nothing"], "unknown method 'nothing'"),
        (["--method", "kvzip"], "use snapkv, h2o"),
        (["--budget", "lots"], "is not a budget"),
        (["--budget", "64MiB"], "vLLM sizes the pool"),
        (["--prefill", "never"], "'auto', 'once' or 'chunks'"),
        (["-o", "windows=3"], "did you mean 'window'"),
        (["--option", "window"], "must read name=value"),
        (["--scheduler-cls", "my.S"], "leave --scheduler-cls out"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "check"])
def test_a_wrong_option_is_one_sentence(command, arguments, says):
    done = run(command, "model", *arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert says in done.stderr


def test_a_trial_names_what_is_missing(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"prompt": "a"}))
    for arguments, says in [
        ([], "give the log and the model first"),
        ([str(log), "--port"], "give the log and the model first"),
        ([str(tmp_path / "none"), "model"], "cannot be read"),
        ([str(log), "model", "--setting", "snapkv"], "METHOD:BUDGET"),
    ]:
        done = run("trial", *arguments)
        assert done.exit_code == 2
        assert says in done.stderr


@pytest.mark.parametrize("command", ["serve", "check", "trial"])
def test_help_names_the_model(command):
    done = run(command, "--help")
    assert done.exit_code == 0
    assert "MODEL" in done.stdout
