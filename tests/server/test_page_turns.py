"""The turns of the page in a browser: reading progress, stop, copy, regenerate, edit, the system prompt, code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.resources import files
from itertools import product
from typing import Any

import pytest

from millpond.server.markdown import LANGUAGES
from tests.helpers.server.fake import FakeLLM
from tests.helpers.server.live import Live, live, until
from tests.helpers.server.window import IDLE, Window, in_browser
from tests.helpers.server.window import window as window  # a fixture

PAGE = files("millpond.server").joinpath("page")
EVIL = '<img src=x onerror="window.evil=1"><script>window.evil=1</script>'
CODE = """# what it does
def f(x: int) -> str:
    return f"{x}</code></pre><img src=x onerror=alert(1)>" + 'a' * 12
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(lambda: FakeLLM(4096)) as running:
        yield running


@pytest.fixture
def page(window: Window, server: Live) -> Iterator[Window]:
    """The page, empty, with nothing kept from before."""
    window.visit(f"{server.url}/")
    window.run("localStorage.clear(); document.getElementById('system').value = ''")
    yield window
    window.run("localStorage.clear()")


def says(server: Live, text: str) -> Any:
    """Let the model say a text; the old words, to be put back."""
    usual, server.llm.text = server.llm.text, lambda ids: text if len(ids) > 2 else text[: 4 * len(ids)]
    return usual


@in_browser
def test_a_long_prompt_says_how_far_it_is_read(page: Window, server: Live) -> None:
    server.llm.reading.clear()
    try:
        page.type("w5 w6 w7 w8 w9 w10")
        page.enter()
        page.wait("document.querySelector('.reading progress')?.value === 4")
        total = len(server.llm.asked[-1].prompt)
        assert page.texts(".reading p") == [f"Reading 4 of {total} tokens"]
        assert page.run("document.querySelector('.reading progress').max") == total
        page.wait("document.querySelectorAll('#text .t').length === 4")  # what it holds is shown while it reads
    finally:
        server.soon(server.llm.reading.set)
    page.wait(f"document.querySelector('.assistant').textContent.length > 3 && {IDLE}")
    assert page.texts(".reading") == []


@in_browser
def test_progress_in_words(page: Window) -> None:
    page.run("""import("./page/reading.js").then(({ Reading }) => {
      const box = document.createElement("div"), reading = new Reading(box);
      window.words = [[0, 8000, 0, 0], [2000, 8000, 0, 5000], [4000, 8000, 2000, 5000], [1000, 800000, 0, 1000],
        [7999, 8000, 0, 90000], [8000, 8000, 0, 1]].map(([processed, total, cache, time_ms]) => {
        reading.show({ processed, total, cache, time_ms });
        return reading.words.textContent;
      });
    })""")
    page.wait("window.words !== undefined")
    assert page.run("words") == [
        "Reading 0 of 8,000 tokens",
        "Reading 2,000 of 8,000 tokens · about 15 s left",
        "Reading 4,000 of 8,000 tokens · 2,000 were known · about 10 s left",
        "Reading 1,000 of 800,000 tokens · about 13 min left",
        "Reading 7,999 of 8,000 tokens",
        "Read 8,000 tokens",
    ]


@in_browser
def test_what_is_stopped_while_it_is_read_can_be_tried_again(page: Window, server: Live) -> None:
    server.llm.reading.clear()
    try:
        page.type("w5 w6 w7")
        page.enter()
        page.wait("document.querySelector('.reading progress')?.value === 4")
        hidden = "['send', 'stop'].map((id) => document.getElementById(id).hidden)"
        assert page.run(hidden) == [True, False]
        page.click("#stop")
        page.wait(IDLE)
        until(lambda: list(server.llm.ended.values())[-1] == "closed")
    finally:
        server.soon(server.llm.reading.set)
    assert page.texts(".error, .assistant") == []
    assert page.texts(".unanswered .user") == ["w5 w6 w7"]
    page.ask("w8")
    assert page.messages() == [("user", "w8")], "what was not answered is not sent"
    page.run("document.getElementById('fresh').click()")
    server.llm.reading.clear()
    page.type("w5 w6 w7")
    page.enter()
    page.wait("document.querySelector('.reading progress')?.value === 4")
    page.click("#stop")
    page.wait(IDLE)
    server.soon(server.llm.reading.set)
    page.click(".again")
    page.wait(f"document.querySelector('.assistant') && {IDLE}")
    assert page.texts(".unanswered") == []
    assert page.messages() == [("user", "w5 w6 w7")]


@in_browser
def test_another_answer_takes_the_place_of_the_last(page: Window) -> None:
    page.ask("w5")
    page.ask("w6")
    shown = "[...document.querySelectorAll('.again')].filter((e) => e.checkVisibility()).length"
    assert page.run(shown) == 1, "of the last turn alone"
    before = page.messages()
    page.click(".of-assistant .again")
    page.wait(f"sent.length === 3 && {IDLE}")
    assert page.messages() == before
    assert len(page.texts(".user")) == len(page.texts(".assistant")) == 2


@in_browser
def test_an_earlier_message_is_changed_and_the_chat_goes_on_from_there(page: Window) -> None:
    page.ask("w5")
    page.ask("w6")
    first = "document.querySelectorAll('.change')[0]"
    page.run(f"{first}.click()")
    assert page.run("document.activeElement.value") == "w5"
    page.press("Escape")
    assert page.texts(".edit") == []
    page.run(f"{first}.click()")
    page.run("document.activeElement.select()")
    page.type("w9 w10")
    page.enter()
    page.wait(f"sent.length === 3 && {IDLE}")
    assert page.messages() == [("user", "w9 w10")]
    assert page.texts(".user") == ["w9 w10"]
    assert len(page.texts(".assistant")) == 1
    page.ask("w7")
    assert [role for role, _ in page.messages()] == ["user", "assistant", "user"]


@in_browser
def test_the_system_prompt_is_sent_first_kept_and_never_evicted(page: Window, server: Live) -> None:
    page.run("""(() => { const box = document.getElementById("system"); box.value = "w8 <b>w9</b>";
      box.dispatchEvent(new Event("input", { bubbles: true })); })()""")
    page.ask("w5")
    assert page.messages() == [("system", "w8 <b>w9</b>"), ("user", "w5")]
    assert page.run("sent[0].messages[0].millpond") == {"keep": True}
    assert server.llm.asked[-1].marks.keep, "the engine is told"
    assert page.texts("#log .system") == ["w8 <b>w9</b>"]
    page.run("document.getElementById('fresh').click()")
    page.run("document.getElementById('keep').click()")
    page.ask("w5")
    assert page.messages()[0] == ("system", "w8 <b>w9</b>")
    assert not server.llm.asked[-1].marks.keep
    page.visit(f"{server.url}/")
    assert page.run("document.getElementById('system').value") == "w8 <b>w9</b>", "in this browser"
    page.run("document.getElementById('system').value = ''")
    page.ask("w5")
    assert page.messages() == [("user", "w5")]


@in_browser
@pytest.mark.parametrize("secure", [True, False], ids=["clipboard", "selection"])
def test_answers_and_code_are_copied_as_the_model_wrote_them(page: Window, server: Live, secure: bool) -> None:
    told = f"**Look:**\n\n```python\n{CODE}```\n"
    usual = says(server, told)
    page.run(f"""(() => {{ window.copied = []; const keep = (text) => {{ window.copied.push(text); }};
      Object.defineProperty(navigator, "clipboard", {{ configurable: true,
        value: {"{ writeText: async (text) => keep(text) }" if secure else "undefined"} }});
      document.execCommand = () => {{ keep(document.activeElement.value); return true; }}; }})()""")
    try:
        page.ask("w5")
        page.click(".tool[aria-label='Copy: Model']")
        page.click(".code .tool")
        page.wait("copied.length === 2")
        assert page.run("copied") == [told, CODE.rstrip("\n")]
        page.wait("document.querySelector('.code .tool').textContent === 'Copied'")
        assert page.texts("#status") == ["Copied"]
    finally:
        server.llm.text = usual


@in_browser
def test_code_is_coloured_and_stays_the_text_that_it_is(page: Window, server: Live) -> None:
    usual = says(server, f"```Python\n{CODE}```\n\n```evil\n{CODE}```\n")
    try:
        page.ask("w5")
        assert page.texts(".code pre") == [CODE, CODE]
        assert page.texts(".code figcaption span") == ["python", "code"]
        marked = page.run(
            "[...document.querySelectorAll('.code')].map((f) => [...f.querySelectorAll('pre span')].map("
            "(e) => [e.className, e.textContent]))"
        )
        assert ["hl-comment", "# what it does"] in marked[0]
        assert [["hl-word", word] for word in ("def", "return")] == [e for e in marked[0] if e[0] == "hl-word"]
        assert ["hl-name", "f"] in marked[0]
        assert ["hl-number", "12"] in marked[0]
        assert ["hl-string", "'a'"] in marked[0]
        assert marked[1] == [], "a language that nobody knows"
        assert page.run("document.querySelectorAll('.assistant :is(img, script, a)').length") == 0
    finally:
        server.llm.text = usual


@in_browser
def test_whatever_code_says_colouring_keeps_its_text_and_ends(page: Window) -> None:
    """Every kind of language, with texts that make patterns try again and again."""
    again = ["-", "a-", "a.", "a ", '"', "'''", "/*", "<a", "<!--", "\\", '"\\', "`", " ", "1", "\n+", "@@", "é🎈\0"]
    long = [(piece * 20_000)[:20_000] for piece in again]
    texts = [CODE, EVIL, "", "a" + " " * 19_998, *long]
    names = ["c", "python", "bash", "sql", "json", "yaml", "css", "html", "diff", "", "evil", "__proto__", "valueOf"]
    script = """import("./page/highlight.js").then(({ highlighted }) => {
      const wrong = [];
      let ms = 0;
      for (const name of %s) for (const text of %s) {
        const box = document.createElement("div"), times = [0, 1, 2].map(() => {
          const began = performance.now(), made = highlighted(text, name);
          box.replaceChildren(made);
          return performance.now() - began;
        });
        ms = Math.max(ms, Math.min(...times));
        if (box.textContent !== text || box.querySelector("*:not(span)")) wrong.push([name, text.slice(0, 20)]);
      }
      window.coloured = { wrong, ms };
    })"""
    page.run(script % (json.dumps(names), json.dumps(texts)))
    page.wait("window.coloured !== undefined", 60)
    found = page.run("coloured")
    assert found["wrong"] == []
    assert found["ms"] < 100, "the longest of them"


@in_browser
def test_nothing_that_anybody_says_runs(page: Window, server: Live) -> None:
    usual = says(server, f"{EVIL}\n\n```{EVIL}\n{EVIL}\n```\n\n| {EVIL} |\n|---|\n| {EVIL} |\n\n`{EVIL}`")
    try:
        page.run(f"document.getElementById('system').value = {EVIL!r}")
        page.run(f"document.getElementById('input').value = {EVIL!r}; document.getElementById('send').click()")
        page.wait(f"document.querySelector('.assistant table') !== null && {IDLE}")
        assert page.texts(".user") == page.texts(".system") == [EVIL]
        page.click(".change")
        page.run(f"document.getElementById('method').value = {EVIL!r}; document.querySelector('.edit').requestSubmit()")
        page.wait("document.querySelector('.error') !== null")
        page.problems[:] = [problem for problem in page.problems if "400" not in problem]  # the browser's own note
        assert page.run("document.querySelectorAll('#log :is(img, script)').length") == 0
        assert page.run("window.evil") is None
    finally:
        server.llm.text = usual


@in_browser
def test_every_control_has_a_name(page: Window, server: Live) -> None:
    usual = says(server, f"```python\n{CODE}```")
    try:
        page.run("document.getElementById('system').value = 'w8'; document.getElementById('settings').open = true")
        page.ask("w5")
        page.click(".change")
        nodes = page.call("Accessibility.getFullAXTree")["nodes"]
        roles = {
            "button",
            "textbox",
            "combobox",
            "checkbox",
            "spinbutton",
            "progressbar",
            "log",
            "article",
            "region",
            "group",
            "image",
            "status",
            "DisclosureTriangle",
        }
        controls = [node for node in nodes if not node["ignored"] and node["role"]["value"] in roles]
        assert len(controls) > 20
        nameless = [node["role"]["value"] for node in controls if not node.get("name", {}).get("value", "").strip()]
        assert set(nameless) <= {"status", "group"}, "which are read as they are"
        page.press("Escape")
        assert page.run("document.getElementById('log').getAttribute('aria-live')") == "off"
        assert "The model says:" in page.texts("#status")[0], "once, when it is there"
    finally:
        server.llm.text = usual


@in_browser
def test_on_a_phone_the_memory_is_a_button_away(page: Window, server: Live) -> None:
    usual = says(server, "```python\n" + "x = " + "1 + " * 80 + "1\n```\n" + "long" * 90)
    page.call("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=2, mobile=True)
    try:
        page.ask("w5")
        seen = "document.getElementById('memory').checkVisibility()"
        assert not page.run(seen)
        assert page.run("document.documentElement.scrollWidth") <= 360
        page.click("#panel")
        assert page.run(f"[{seen}, document.getElementById('panel').getAttribute('aria-expanded')]") == [True, "true"]
        bottom = page.run("document.getElementById('form').getBoundingClientRect().bottom")
        assert bottom <= 740, "what one writes in stays in sight"
        page.click("#panel")
        assert not page.run(seen)
    finally:
        server.llm.text = usual
        page.call("Emulation.setDeviceMetricsOverride", width=1360, height=900, deviceScaleFactor=1, mobile=False)


def test_the_server_lets_the_languages_through_that_the_page_knows() -> None:
    script = PAGE.joinpath("highlight.js").read_text(encoding="utf-8")
    table = re.search(r"LANGUAGES = \{(.*?)\n\};", script, re.DOTALL)
    assert table is not None
    assert sorted(" ".join(re.findall(r'"([^"]*)"', table[1])).split()) == sorted(LANGUAGES)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_words_can_be_read_on_their_ground(dark: bool) -> None:
    """A contrast of 4.5 at least, as WCAG's AA asks of text."""
    styles = "".join(PAGE.joinpath(name).read_text(encoding="utf-8") for name in ("style.css", "code.css"))
    blocks = re.findall(r":root \{(.*?)\}", styles, re.DOTALL)  # light and dark of each file
    schemes = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block)) for block in blocks]
    found = schemes[0] | schemes[2] | (schemes[1] | schemes[3] if dark else {})
    code = [name for name in found if name.startswith("hl-")]
    pairs = [
        *product(["ink", "soft", "faded", "accent", "rust"], ["paper", "raised"]),
        *product([*code, "ink", "soft"], ["code"]),
        *product(["ink", "soft"], ["lost"]),
        ("on-accent", "accent"),
        ("ink", "plain"),
    ]
    assert len(code) == 5
    assert {pair: round(ratio, 2) for pair in pairs if (ratio := contrast(found[pair[0]], found[pair[1]])) < 4.5} == {}


def contrast(one: str, other: str) -> float:
    """As WCAG counts it."""

    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)
