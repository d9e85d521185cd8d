"""The page as a person meets it: in a browser, from the disk, with a keyboard."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from millpond.cli.app import app
from millpond.hf.compress import compress
from millpond.inspector import page, payload
from millpond.inspector.palette import DEEP, contrast, luminance, text_on, water
from millpond.inspector.token_text import encode_pieces
from millpond.inspector.trace import Change, HeadTrace, Trace, read_trace
from millpond.inspector.trace_recorder import record_trace
from tests.helpers.evals.browser import CHROMIUM, Browser
from tests.helpers.evals.small import save_tiny, text, tiny_model, tiny_tokenizer

in_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium or google-chrome on the PATH")
NEW = 9
LOOKS = """(() => { const of = (name) => [...document.querySelectorAll(`#text .${name}`)].map((t) => +t.dataset.p);
  return {kept: of("kept"), gone: of("gone"), now: of("now"), fresh: of("fresh"), later: of("later")}; })()"""
STATE = "[state.value, layer.value, head.value].map(Number)".replace("state", "step")


@pytest.fixture(scope="module")
def trace() -> Trace:
    with compress(tiny_model(), "h2o", "20%") as cache:
        coded = encode_pieces(tiny_tokenizer(), text(58, 3) + "\n\nw5 </script> w6")
        return record_trace(tiny_model(), tiny_tokenizer(), cache, coded, {"method": "h2o", "budget": "20%"}, NEW)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened
        assert opened.problems == []  # no exception, no refused content, and nothing asked of the network


@pytest.fixture(scope="module")
def file(trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(page(trace), encoding="utf-8")
    return path


def at(browser: Browser, file: Path, address: str = "") -> dict[str, list[int]]:
    browser.open(file, address)
    return looks(browser)


def looks(browser: Browser) -> dict[str, list[int]]:
    browser.wait("document.querySelectorAll('#text [data-p]:not([class])').length === 0")
    found: dict[str, list[int]] = browser.run(LOOKS)
    return found


def test_the_page_stands_alone(trace: Trace) -> None:
    made = page(trace)
    assert "{{" not in made
    assert not re.search(r"""(src|href)=|@import|url\(|https?://""", made)
    assert made.count("</script>") == 2  # the text's own does not end ours
    stored = re.search(r'<script type="application/json" id="trace">(.*?)</script>', made, re.DOTALL)
    assert stored is not None
    assert json.loads(stored[1])["tokens"] == list(trace.tokens)


@in_browser
@pytest.mark.parametrize(("step", "layer", "head"), [(0, 0, 0), (1, 1, 1), (5, 0, 1), (8, 1, 0)])
def test_the_page_shows_what_the_cache_held(
    browser: Browser, file: Path, trace: Trace, step: int, layer: int, head: int
) -> None:
    shown = at(browser, file, f"step={step}&layer={layer}&head={head}")
    seen, change = trace.n_prompt + step, trace.heads[layer][head].changes[step - 1]
    assert shown["kept"] == trace.kept(layer, head, step)
    assert shown["gone"] == sorted(set(range(seen)) - set(shown["kept"]))
    assert shown["now"] == (sorted(change.evicted) if step else [])
    assert shown["fresh"] == [seen]
    assert shown["later"] == list(range(seen + 1, len(trace.tokens)))
    assert browser.run("document.querySelector('#tally').textContent").startswith(f"{len(shown['kept'])} of {seen} ")


@in_browser
def test_colours_follow_scores(browser: Browser, file: Path, trace: Trace) -> None:
    at(browser, file, "step=8&layer=1&head=0")
    shades = browser.run(
        "Object.fromEntries([...document.querySelectorAll('#text .kept')]"
        ".map((t) => [t.dataset.p, Number((t.className.match(/ c(\\d+)/) || [0, -1])[1])]))"
    )
    scores = trace.scores(1, 0, 8)
    ordered = [shades[str(p)] for p in sorted(scores, key=lambda p: scores[p])]
    assert ordered == sorted(ordered)
    assert (ordered[0], ordered[-1]) == (0, 11)


@in_browser
def test_the_text_keeps_its_white_space(browser: Browser, file: Path, trace: Trace) -> None:
    at(browser, file)
    assert browser.run("document.querySelector('#text').textContent") == "".join(trace.tokens)


@in_browser
def test_all_heads_together(browser: Browser, file: Path, trace: Trace) -> None:
    at(browser, file, "step=3&all=1")
    held = [sum(p in trace.kept(layer, head, 3) for layer in (0, 1) for head in (0, 1)) for p in range(trace.n_prompt)]
    names = browser.run("[...document.querySelectorAll('#text [data-p]')].map((t) => t.className)")
    wanted = {0: "t gone", 1: "t some o3", 2: "t some o5", 3: "t some o8", 4: "t some o10"}
    assert names[: trace.n_prompt] == [wanted[n] for n in held]
    strength = browser.run(
        "[1, 5, 10].map((n) => getComputedStyle(document.querySelector(`.legend .o${n}`)).getPropertyValue('--share'))"
    )
    assert [float(share) for share in strength] == [0.08, 0.5, 1.0]


@in_browser
def test_every_key(browser: Browser, file: Path, trace: Trace) -> None:
    at(browser, file)
    last = trace.n_steps
    for key, wanted in [
        ("ArrowRight", [1, 0, 0]),
        ("ArrowRight", [2, 0, 0]),
        ("ArrowLeft", [1, 0, 0]),
        ("ArrowDown", [1, 0, 1]),
        ("ArrowDown", [1, 0, 1]),
        ("PageDown", [1, 1, 1]),
        ("ArrowUp", [1, 1, 0]),
        ("PageUp", [1, 0, 0]),
        ("End", [last, 0, 0]),
        ("ArrowRight", [last, 0, 0]),
        ("Home", [0, 0, 0]),
    ]:
        browser.press(key)
        assert browser.run(STATE) == wanted, key
        assert browser.run("location.hash") == "#step={}&layer={}&head={}".format(*wanted)
    browser.press("a")
    assert browser.run("document.querySelector('#all').getAttribute('aria-pressed')") == "true"
    browser.press("a")
    assert looks(browser)["kept"] == trace.kept(0, 0, 0)
    browser.press(" ")
    assert browser.run("document.querySelector('#play').getAttribute('aria-label')") == "Pause"
    browser.wait("Number(step.value) >= 2")
    browser.press(" ")
    now = browser.run("step.value")
    assert browser.run("document.querySelector('#play').getAttribute('aria-label')") == "Play"
    assert browser.run("new Promise((go) => setTimeout(() => go(step.value), 500))") == now


@in_browser
def test_tokens_by_keyboard_and_what_is_said_of_them(browser: Browser, file: Path, trace: Trace) -> None:
    step, layer, head = 6, 0, 0
    at(browser, file, f"step={step}&layer={layer}&head={head}")
    gone = next(s for s in range(step, 0, -1) if trace.heads[0][0].changes[s - 1].evicted)
    position = trace.heads[0][0].changes[gone - 1].evicted[0]
    browser.run(f"location.hash = 'step={step}&layer=0&head=0&token={position - 1}'")
    browser.wait(f"document.querySelector('#token dd').textContent.startsWith('{position - 1} ')")
    browser.press("ArrowRight", shift=True)
    assert browser.run("Number(document.activeElement.dataset.p)") == position
    said = browser.run("document.querySelector('#token').innerText")
    kept = sum(position in trace.kept(layer, head, step) for layer in (0, 1) for head in (0, 1))
    assert f"{kept} of 4 heads" in said
    assert f"forgotten at step {gone}" in said
    assert f"position {position}, kept in {kept} heads" in browser.run("live.textContent")
    assert browser.run("document.querySelectorAll('#text [tabindex=\"0\"]').length") == 1


@in_browser
def test_pointing_at_a_token_tells_its_score(browser: Browser, file: Path, trace: Trace) -> None:
    at(browser, file, "step=2&layer=1&head=1")
    position, score = max(trace.scores(1, 1, 2).items(), key=lambda item: item[1])
    browser.move(f'#text [data-p="{position}"]')
    browser.wait("document.querySelector('#token .facts') !== null")
    facts = browser.run("document.querySelector('#token .facts').innerText")
    assert f"{position} (prompt)" in facts
    told = re.search(r"score\s+([\d.]+)", facts)
    assert told is not None
    assert float(told[1]) == pytest.approx(score, rel=0.06)


@in_browser
def test_everything_has_a_name_and_enough_contrast(browser: Browser, file: Path) -> None:
    at(browser, file, "step=4&layer=1&head=1")
    tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    wanted = {"button", "slider", "combobox", "image"}
    named = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in tree if not n["ignored"]]
    found = [(role, name) for role, name in named if role.lower() in wanted]
    assert {role.lower() for role, _ in found} >= {"button", "slider", "combobox"}
    assert all(name for _, name in found), found
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        for name, least in (("ink", 7.0), ("soft", 4.5), ("faded", 4.5), ("accent", 4.5)):
            colour, paper = (colour_named(browser, n) for n in (name, "paper"))
            assert contrast(colour, paper) >= least, (scheme, name)
        assert contrast(colour_named(browser, "rust"), colour_named(browser, "rust-ground")) >= 4.5
        assert contrast(colour_named(browser, "ink"), colour_named(browser, "ground")) >= 4.5
    browser.prefer("light")


def colour_named(browser: Browser, name: str) -> str:
    colour = browser.run(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}').trim()")
    assert isinstance(colour, str)
    return colour


@pytest.mark.parametrize("dark", [False, True])
def test_the_scale_is_ordered_and_text_on_it_reads(dark: bool) -> None:
    shades = water(12, dark)
    bright = [luminance(shade) for shade in shades]
    assert bright == sorted(bright, reverse=not dark)
    assert min(contrast(text_on(shade), shade) for shade in shades) >= 4.5
    assert contrast(DEEP, "#ffffff") > 18


@in_browser
def test_merged_and_demoted_show_only_where_a_trace_says_so(
    browser: Browser, file: Path, trace: Trace, tmp_path: Path
) -> None:
    at(browser, file)
    assert "merged" not in browser.run("legend.innerText")
    head = trace.heads[0][0]
    gone, kept = next(p for p in range(9, 60) if p not in head.first), head.first[-1]
    changed = replace(head, merged=((0, gone, kept),), demoted=((0, kept, "int4"),))
    other = replace(trace, heads=((changed, *trace.heads[0][1:]), *trace.heads[1:]))
    (tmp_path / "b.html").write_text(page(other), encoding="utf-8")
    at(browser, tmp_path / "b.html", f"step=0&layer=0&head=0&token={gone}")
    assert "merged into another" in browser.run("legend.innerText")
    assert "held in fewer bits" in browser.run("legend.innerText")
    assert browser.run("[...document.querySelectorAll('#text .merged')].map((t) => +t.dataset.p)") == [gone]
    assert browser.run("[...document.querySelectorAll('#text .demoted')].map((t) => +t.dataset.p)") == [kept]
    assert f"into position {kept}" in browser.run("document.querySelector('#token').innerText")


def large() -> Trace:
    """4,096 tokens, 8 layers, 4 heads, 128 steps, of which every fourth has scores."""
    rng, n, steps = np.random.default_rng(0), 4096, 128

    def one() -> HeadTrace:
        first = sorted(rng.choice(n, 819, replace=False).tolist())
        gone = rng.permutation(first)[:steps].tolist()
        changes = tuple(Change((g,), (n + s,)) for s, g in enumerate(gone))
        levels = tuple(rng.integers(1, 256, 819, dtype=np.uint8).tobytes() for _ in range(0, steps + 1, 4))
        return HeadTrace(tuple(first), changes, 1e-3, 50.0, levels)

    return Trace(
        {"method": "h2o"},
        tuple(f" word{i % 97}" for i in range(n + steps + 1)),
        n,
        tuple(tuple(one() for _ in range(4)) for _ in range(8)),
        tuple(range(0, steps + 1, 4)),
        (1,) * (steps + 1),
        (5,) * (steps + 1),
    )


@in_browser
def test_a_large_trace_stays_small_and_answers(browser: Browser, tmp_path: Path) -> None:
    made = large()
    path = tmp_path / "large.html"
    path.write_text(page(made), encoding="utf-8")
    assert path.stat().st_size < 3_000_000
    shown = at(browser, path, "step=100&layer=7&head=3")
    assert shown["kept"] == made.kept(7, 3, 100)
    spent: Any = browser.run(
        "(() => { const t = performance.now(); for (let i = 0; i < 20; i++) document.body.dispatchEvent("
        "new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true})); return performance.now() - t; })()"
    )
    assert spent / 20 < 100  # ms a step; about 5 on an idle machine
    assert looks(browser)["kept"] == made.kept(7, 3, 120)


def test_a_full_cache_of_that_size_stays_below_15_mb() -> None:
    made = large()
    whole = tuple(range(4096))
    heads = tuple(
        tuple(
            replace(
                h,
                first=whole,
                changes=tuple(Change((), c.added) for c in h.changes),
                levels=tuple(bytes(4096 + 4 * f) for f in range(33)),
            )
            for h in layer
        )
        for layer in made.heads
    )
    assert len(page(replace(made, heads=heads))) < 15_000_000


def test_positions_become_bits(trace: Trace) -> None:
    import base64

    bits = np.unpackbits(
        np.frombuffer(base64.b64decode(payload(trace)["heads"][1][0]["first"]), np.uint8), bitorder="little"
    )
    assert np.flatnonzero(bits).tolist() == trace.kept(1, 0, 0)


def test_the_command_writes_page_and_trace(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    (tmp_path / "prompt.txt").write_text(text(60, 5))
    done = CliRunner().invoke(
        app,
        [
            "inspect",
            "--prompt-file",
            str(tmp_path / "prompt.txt"),
            "--model",
            model,
            "--budget",
            "24",
            "-o",
            "sinks=2",
            "--max-new-tokens",
            "4",
            "--out",
            str(tmp_path / "x" / "page.html"),
            "--trace",
            str(tmp_path / "a.trace.json"),
        ],
    )
    assert done.exit_code == 0, done.output
    assert "61 tokens read, 4 written" in done.output
    trace = read_trace(tmp_path / "a.trace.json")
    assert (tmp_path / "x" / "page.html").read_text(encoding="utf-8") == page(trace)
    assert trace.setting["method"] == "h2o:sinks=2"
    assert len(trace.kept(0, 0, 3)) == 24


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "give the prompt either"),
        (["--prompt", "w2", "--method", "h3o"], "did you mean 'h2o'"),
        (["--prompt", "w2", "-o", "sinks"], "must read name=value"),
        (["--prompt", "w2", "--chat"], "no chat template"),
        (["--prompt", "w2 w3 w4 w5 w6", "--budget", "8", "--out", "{model}"], "cannot be written"),
    ],
)
def test_the_command_refuses(tmp_path: Path, options: list[str], sentence: str) -> None:
    model = save_tiny(tmp_path / "model")
    done = CliRunner().invoke(app, ["inspect", "--model", model, *(o.format(model=model) for o in options)])
    assert done.exit_code == 2
    assert sentence in done.stderr
