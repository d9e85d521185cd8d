import json

import pytest

from millpond import OptionError
from millpond_vllm.cli.vllm_arguments import split_arguments, unused_settings, vllm_arguments

OURS = {"millpond": {"method": "snapkv"}}
ENGINE = {
    "scheduler_cls": "millpond_vllm.scheduler.S",
    "worker_cls": "millpond_vllm.worker.W",
    "logits_processors": ["millpond_vllm.request_check:RequestCheck"],
    "additional_config": OURS,
}
CLASSES = ["--scheduler-cls", ENGINE["scheduler_cls"], "--worker-cls", ENGINE["worker_cls"]]
CHECK = ["--logits-processors", *ENGINE["logits_processors"]]


def test_own_options_are_taken_out_and_the_rest_keeps_its_order():
    flags = {"--method": True, "--force": False, "-o": True}
    given = ["-tp", "2", "--method", "h2o", "model", "-o", "sinks=2", "--force", "-dph", "--method=tova", "--port", "1"]
    own, rest = split_arguments(given, flags)
    assert own == ["--method", "h2o", "-o", "sinks=2", "--force", "--method=tova"]
    assert rest == ["-tp", "2", "model", "-dph", "--port", "1"]


def test_what_the_user_gives_stays_in_front_unchanged():
    given = ["model", "--port", "8000", "-tp", "2", "--compilation-config.mode", "3"]
    assert vllm_arguments(given, ENGINE) == [*given, *CLASSES, *CHECK, "--additional-config", json.dumps(OURS)]


@pytest.mark.parametrize("given", [["--additional-config", '{"a": 1}'], ['--additional_config={"a": 1}']])
def test_an_additional_configuration_is_merged(given):
    made = vllm_arguments(["model", *given], ENGINE)
    assert json.loads(made[-1]) == {"a": 1, **OURS}


def test_a_dotted_configuration_stays_dotted():
    made = vllm_arguments(["model", "--additional_config.a.b", "1"], ENGINE)
    assert made[-2:] == ["--additional-config.millpond", json.dumps(OURS["millpond"])]


def test_a_file_of_settings_is_merged(tmp_path):
    pytest.importorskip("yaml")
    file = tmp_path / "serve.yaml"
    file.write_text("additional_config:\n  a: 1\nlogits-processors:\n  - m:A\n  - m:B\n")
    made = vllm_arguments(["model", "--config", str(file)], ENGINE)
    assert json.loads(made[-1]) == {"a": 1, **OURS}
    at = made.index("--logits-processors")
    assert made[at + 1 : at + 4] == ["m:A", "m:B", *ENGINE["logits_processors"]]


def test_processors_of_the_user_stay():
    made = vllm_arguments(["model", "--logits-processors", "m:A", "m:B", "--port", "1"], ENGINE)
    assert made[:3] == ["model", "--port", "1"]
    at = made.index("--logits-processors")
    assert made[at + 1 : at + 4] == ["m:A", "m:B", *ENGINE["logits_processors"]]


@pytest.mark.parametrize("flag", ["-sc", "--speculative-config", "--speculative_config.model"])
def test_speculative_decoding_leaves_out_the_check(flag):
    assert "--logits-processors" not in vllm_arguments(["model", flag, "{}"], ENGINE)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--scheduler-cls", "my.S"], "leave --scheduler-cls out"),
        (["--worker_cls=my.W"], "leave --worker-cls out"),
        (["--additional-config", '{"millpond": {}}'], "--method, --budget"),
        (["--additional-config.millpond.budget", "20%"], "--method, --budget"),
        (["--additional-config", "{"], "no JSON"),
        (["--additional-config", "[1]"], "JSON object"),
        (["--config", "missing.yaml"], "cannot be read"),
    ],
)
def test_what_cannot_be_merged_is_refused(given, says):
    if "--config" in given:
        pytest.importorskip("yaml")
    with pytest.raises(OptionError, match=says):
        vllm_arguments(["model", *given], ENGINE)


@pytest.mark.parametrize(
    ("arguments", "unused"),
    [
        (["serve", "m", "--additional-config", '{"millpond": {}}'], True),
        (["serve", "m", '--additional_config={"millpond": {}}'], True),
        (["serve", "m", "--additional-config.millpond.budget", "20%"], True),
        (["serve", "m", "--additional-config", '{"millpond": {}}', *CLASSES[:2]], True),
        (["serve", "m", "--additional-config", '{"millpond": {}}', *CLASSES], False),
        (["serve", "m", "--additional-config", '{"other": 1}'], False),
        (["train", "millpond", "--config", "no-such-file"], False),
        (["serve", "m", "--additional-config", "{"], False),
    ],
)
def test_settings_without_the_classes_are_seen(arguments, unused):
    assert unused_settings(arguments) is unused
