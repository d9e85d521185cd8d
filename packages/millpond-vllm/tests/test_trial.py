import json

import pytest

from millpond import BudgetError, DataError, OptionError
from millpond_vllm.trial import parent
from millpond_vllm.trial.log import MAX_TOKENS, read_log
from millpond_vllm.trial.parent import Trial
from millpond_vllm.trial.rows import Agreement, TrialRow, agreement, read_rows, smallest
from millpond_vllm.trial.setting import LADDER, TrialSetting


def written(tmp_path, *lines):
    file = tmp_path / "log.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return file


def test_a_log_has_prompts_token_ids_and_chats(tmp_path):
    chat = [{"role": "user", "content": "hello"}]
    lines = [
        {"prompt": "a text", "max_tokens": 8},
        "",
        {"prompt": [1, 2]},
        {"messages": chat, "max_completion_tokens": 3},
    ]
    found = read_log(written(tmp_path, *lines))
    assert [(one.prompt, one.messages, one.max_tokens) for one in found] == [
        ("a text", None, 8),
        ([1, 2], None, MAX_TOKENS),
        (None, chat, 3),
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: no JSON"),
        ([1], "must be an object"),
        ({}, "either prompt or messages"),
        ({"prompt": "a", "messages": []}, "either prompt or messages"),
        ({"prompt": ""}, "not empty"),
        ({"prompt": [1, -1]}, "token ids"),
        ({"prompt": [True]}, "token ids"),
        ({"messages": [{"role": "nobody", "content": "a"}]}, "must be a list of"),
        ({"messages": "hello"}, "must be a list of"),
        ({"prompt": "a", "max_tokens": 0}, "whole number"),
        ({"prompt": "a", "max_tokens": True}, "whole number"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path, line, says):
    with pytest.raises(DataError, match=says):
        read_log(written(tmp_path, {"prompt": "first"}, line))


def test_a_log_without_requests_is_refused(tmp_path):
    with pytest.raises(DataError, match="no request"):
        read_log(written(tmp_path, ""))
    with pytest.raises(DataError, match="cannot be read"):
        read_log(tmp_path / "missing.jsonl")


def test_settings_read_method_and_budget():
    assert [str(TrialSetting.parse(text)) for text in LADDER] == list(LADDER)
    for wrong in ("snapkv", "snapkv:", ":20%", "nothing:20%", "kvzip:20%"):
        with pytest.raises(OptionError):
            TrialSetting.parse(wrong)
    with pytest.raises(BudgetError):
        TrialSetting.parse("snapkv:lots")


def row(setting, tokens, freed=0, load="x"):
    return TrialRow(setting, load, tokens, 100, 2.0, 3.0, 4, freed)


STOCK = row("stock", [[1, 2, 3, 4], [5, 6]])


def test_agreement_is_the_equal_beginning():
    assert agreement(STOCK, STOCK) == Agreement(1.0, 1.0)
    assert agreement(row("a", [[1, 2, 9, 4], [5, 6]]), STOCK) == Agreement(0.75, 0.5)
    assert agreement(row("a", [[1, 2, 3, 4, 5], [5]]), STOCK) == Agreement((0.8 + 0.5) / 2, 0.0)


def test_the_smallest_setting_keeps_least_of_those_that_agree():
    rows = [
        row("a:50%", STOCK.tokens, 50),
        row("a:30%", [[1, 2, 3, 4], [5, 9]], 70),
        row("a:10%", [[9, 9, 9, 9], [9, 9]], 90),
    ]
    assert smallest(rows, STOCK, 0.9).setting == "a:50%"
    assert smallest(rows, STOCK, 0.7).setting == "a:30%"
    assert smallest(rows[1:], STOCK, 0.9) is None


class Counted(Trial):
    runs: list[str] = []  # noqa: RUF012

    def _row(self, setting, load):
        self.runs.append(str(setting))
        if str(setting) == "snapkv:10%" and self.runs.count("snapkv:10%") == 1:
            raise parent.TrialError("stopped")
        return row(str(setting), STOCK.tokens, load=load)


def test_rows_that_are_there_are_not_run_again(tmp_path, monkeypatch):
    monkeypatch.setattr(parent.compat, "vllm_version", lambda: "0.32.0")
    Counted.runs.clear()
    log, out = written(tmp_path, {"prompt": "a"}), tmp_path / "rows.jsonl"
    settings = [TrialSetting.parse(text) for text in ("snapkv:50%", "snapkv:10%")]
    with pytest.raises(parent.TrialError):
        Counted(log, ["model"], list, out).run(settings, print)
    rows = Counted(log, ["model"], list, out).run(settings, print)
    assert [one.setting for one in rows] == ["stock", "snapkv:50%", "snapkv:10%"]
    assert Counted.runs == ["stock", "snapkv:50%", "snapkv:10%", "snapkv:10%"]
    # other traffic, or another model, has rows of its own
    Counted(log, ["other"], list, out).run([], print)
    log.write_text('{"prompt": "b"}')
    Counted(log, ["model"], list, out).run([], print)
    assert Counted.runs[4:] == ["stock", "stock"]
    assert len(out.read_text().splitlines()) == 5


def test_a_file_that_has_no_rows_is_refused(tmp_path):
    file = tmp_path / "rows.jsonl"
    for text in ('{"a": 1}\n', "nothing\n"):
        file.write_text(text)
        with pytest.raises(DataError):
            read_rows(file, "x")
