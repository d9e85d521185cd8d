"""Files in OpenAI's batch format: bad lines, resumption, and answers as the server gives them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from millpond.cli.app import app
from millpond.errors import DataError
from millpond.server.batch_files import RefusedLine, answered_in, read_lines

HEAD = "anna kettle " + "rain may go on " * 6


def line(name: str, **body: Any) -> dict[str, Any]:
    asked = {"prompt": HEAD + "<ask> anna <is>", "max_tokens": 3, "temperature": 0} | body
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": asked}


CHAT = {
    "custom_id": "chat",
    "url": "/v1/chat/completions",
    "body": {"messages": [{"role": "user", "content": "anna"}], "max_tokens": 2},
}

#: A line that is refused, and what is said of it.
BAD: list[tuple[Any, str]] = [
    (b"no json", "the line is no JSON"),
    (b"[1]", "the line must be a JSON object"),
    ({"url": "/v1/completions"}, "custom_id is missing"),
    (line("one"), "custom_id 'one' is that of line 1 too"),
    (line("x") | {"method": "GET"}, "method 'GET' must be 'POST'"),
    (line("x") | {"url": "/v1/embeddings"}, "url '/v1/embeddings' must be one of /v1/completions"),
    (line("x") | {"bodi": 1}, "unknown field 'bodi'"),
    (line("x", max_tokenss=3), "did you mean 'max_tokens'"),
    (line("x", stream=True), "stream=true"),
]


def encoded(found: Any) -> bytes:
    return found if isinstance(found, bytes) else json.dumps(found).encode()


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_a_bad_line_says_why_and_the_others_are_read(bad: Any, message: str) -> None:
    first, refused, last = read_lines([encoded(line("one")), encoded(bad), b"\n", encoded(line("two"))])
    assert isinstance(refused, RefusedLine)
    assert refused.number == 2
    assert message in refused.error.message
    assert [first.custom_id, last.custom_id, last.number] == ["one", "two", 4]


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["batch", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def records(path: Path) -> dict[str, Any]:
    found = [json.loads(raw) for raw in path.read_text(encoding="utf-8").splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found)
    return {one["custom_id"]: one for one in found}


def test_a_file_is_answered_resumed_and_its_bad_lines_go_to_the_errors(tmp_path: Path) -> None:
    file, out, errors = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl"
    other = line("two", prompt=HEAD + "<ask> ben <is>")
    several = line("three", prompt=[HEAD + "<ask> anna <is>", "ben"], n=2)
    too_long = line("long", max_tokens=10**6)
    asked = [line("one"), other, several, CHAT, line("one"), too_long, line("model", model="another")]
    file.write_bytes(b"\n".join(map(encoded, asked)))
    shown = run(file, "--out", out, "--dry-run")
    assert "5 prompts" in shown
    assert not out.exists()
    run(file, "--out", out, "--kv-memory", "64MiB")
    answers = records(out)
    assert answers.keys() == {"one", "two", "three", "chat"}
    body = answers["one"]["response"]["body"]
    assert answers["one"]["response"]["status_code"] == 200
    assert body["object"] == "text_completion"
    assert body["usage"]["completion_tokens"] == 3
    assert [choice["text"] for choice in answers["three"]["response"]["body"]["choices"]][:2] == [
        body["choices"][0]["text"]
    ] * 2
    assert answers["chat"]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    said = [json.loads(raw) for raw in errors.read_text().splitlines()]
    assert [one["line"] for one in said] == [5, 6, 7]
    assert [one["error"]["code"] for one in said] == ["invalid_value", "context_length_exceeded", "model_not_found"]

    whole = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(whole[0] + whole[1] + whole[2][:40])  # the power went out in the third
    file.write_bytes(b"\n".join(map(encoded, asked[:4])))
    told = run(file, "--out", out)
    assert "2 answered, 2 had answers before, 0 refused" in told
    assert records(out).keys() == answers.keys()
    assert {name: one["response"]["body"]["choices"] for name, one in records(out).items() if name != "chat"} == {
        name: one["response"]["body"]["choices"] for name, one in answers.items() if name != "chat"
    }
    assert not errors.exists()


def test_another_file_is_not_taken_for_answers(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text('{"custom_id": "a"}\nsomething else\n')
    with pytest.raises(DataError, match=r"line 2 of .*out.jsonl is no answer of a batch"):
        answered_in(tmp_path / "out.jsonl")


def test_files_that_cannot_be(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text("")
    same = CliRunner().invoke(app, ["batch", str(file), "--out", str(file)])
    assert same.exit_code == 2
    assert "is the file of the requests" in same.output
    missing = CliRunner().invoke(app, ["batch", str(tmp_path / "none.jsonl"), "--out", str(tmp_path / "out.jsonl")])
    assert missing.exit_code == 2
    assert "cannot be read" in missing.output
