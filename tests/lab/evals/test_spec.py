"""Specs: names with options in lists, values in quotes, and what is said of those that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.errors import OptionError
from millpond_lab.evals.spec import Spec, parse_specs, words
from millpond_lab.evals.task import TASKS
from tests.helpers.evals.task_help import draw, word_tokenizer


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('text:path="sea, shore.txt"', "sea, shore.txt"),
        ("text:path='sea, shore.txt'", "sea, shore.txt"),
        ("text:path='it''s here, too.txt'", "it's here, too.txt"),
        ('text:path="a:stride=3"', "a:stride=3"),
        ("text:path=it's.txt", "it's.txt"),
        (r"text:path=C:\texts\a.txt", r"C:\texts\a.txt"),
        ('text:path=""', ""),
    ],
)
def test_a_value_may_stand_in_quotes(text: str, value: str) -> None:
    (alone,) = parse_specs(text, "tasks")
    assert alone.options == {"path": value}
    first, second = parse_specs(f"{text}:stride=64 , lambada", "tasks")
    assert (first.options, second.name) == ({"path": value, "stride": "64"}, "lambada")


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.text(",:=\"' ab", max_size=8)), min_size=1, max_size=3))
def test_what_a_spec_writes_is_what_it_reads(options: list[dict[str, str]]) -> None:
    specs = [Spec(f"name{place}", each) for place, each in enumerate(options)]
    assert parse_specs(",".join(map(str, specs)), "tasks") == specs
    assert [Spec.parse(str(spec)) for spec in specs] == specs


@pytest.mark.parametrize("text", ['text:path="a,b', "text:path='a'b", 'lambada,text:path="'])
def test_a_quote_that_is_not_closed_is_refused(text: str) -> None:
    for read in (parse_specs, words):
        with pytest.raises(OptionError, match="behind path= must be closed"):
            read(text, "tasks")


def test_a_path_that_a_comma_has_cut_is_recognised() -> None:
    for rest in ("my/shore.txt:stride=3", " shore.txt", "shore.jsonl.gz"):
        with pytest.raises(OptionError, match="put the whole value in quotes"):
            parse_specs(f"text:path=sea,{rest}", "tasks")
    assert len(parse_specs("h2o:recent=0.1,somebody.method", "method")) == 2


def test_a_file_whose_name_has_commas_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "a, b"
    folder.mkdir()
    (folder / "c,d.txt").write_text("some words on a river " * 50)
    (spec,) = parse_specs(f"text:path='{folder}/c,d.txt':context_len=8:continuation_len=4", "tasks")
    assert len(draw(spec.build(TASKS), word_tokenizer())) == 1
