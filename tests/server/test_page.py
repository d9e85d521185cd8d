"""The page as a person meets it: in a browser, with a keyboard."""

from __future__ import annotations

import asyncio
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from millpond.engine.outputs import Forgotten
from millpond.inspector import palette_css
from millpond.server.routes.ui import PATHS
from tests.helpers.server.fake import FakeLLM, client_of
from tests.helpers.server.live import Live, live, until
from tests.helpers.server.page_picture import HEIGHT, WIDTH, take
from tests.helpers.server.window import Window, in_browser
from tests.helpers.server.window import server as server  # fixtures
from tests.helpers.server.window import window as window

BEGUN = "document.querySelector('.assistant:not(:has(.reading))')?.textContent.length > 3"
LOOKS = """(() => [...document.querySelectorAll("#text .t")].map((t) => [t.textContent, t.className]))()"""


def test_the_page_asks_nobody_else() -> None:
    async def work() -> dict[str, Any]:
        async with client_of(FakeLLM()) as client:
            return {path: await client.get(path) for path in PATHS}

    for path, found in asyncio.run(work()).items():
        assert found.status_code == 200
        assert "connect-src 'self'" in found.headers["Content-Security-Policy"]
        assert not re.search(r"https?://|@import|url\(", found.text), path


def test_every_file_of_the_page_is_served() -> None:
    names = {entry.name for entry in files("millpond.server").joinpath("page").iterdir()}
    assert names == {Path(path).name or "page.html" for path in PATHS}


def test_its_colours_are_those_of_the_inspector() -> None:
    style = files("millpond.server").joinpath("page", "style.css").read_text(encoding="utf-8")
    assert "".join(palette_css().split()) in "".join(style.split())


@in_browser
def test_a_chat_and_what_is_remembered(window: Window, server: Live) -> None:
    window.visit(f"{server.url}/")
    assert window.run("document.getElementById('model').textContent") == "fake/counter"
    assert "budget 20%" in window.run("document.getElementById('about').textContent")
    assert window.run("document.activeElement.id") == "input"
    window.type("w5 w6")
    window.enter()
    window.wait("document.querySelector('.assistant') !== null && !document.getElementById('send').disabled")
    assert window.run("document.querySelector('.user').textContent") == "w5 w6"
    asked = server.llm.asked[-1]
    answer = server.llm.text(server.llm.answer(asked.prompt, 0, 8)).strip()
    window.wait(f"document.querySelector('.assistant').textContent.trim() === {answer!r}")
    assert asked.watch
    window.wait("document.querySelectorAll('#text .t').length === 4")
    shown = window.run(LOOKS)
    assert [text for text, _ in shown] == ["<bos>", "w2", "w3", "w4"]
    assert [("kept" in look, "gone" in look) for _, look in shown] == [
        (True, False),
        (False, True),
        (True, False),
        (True, False),
    ]
    levels = [int(found[1]) for _, look in shown if (found := re.search(r"c(\d+)", look))]
    assert levels == [9, 0, 11]  # logarithms of the scores 2, 1/3 and pi
    assert window.run("document.getElementById('fill').style.width") == "50%"
    assert window.run("document.getElementById('held').textContent") == "50 % held"
    shown = window.run("document.getElementById('bytes').textContent")
    assert shown == "200 B in memory, of 400 B for all 4 tokens in the model's own numbers"
    assert "tokens/s" in window.run("document.getElementById('pace').textContent")


def answered(turns: int) -> str:
    return f"document.querySelectorAll('.assistant').length === {turns} && !document.getElementById('send').disabled"


@in_browser
def test_one_figure_tells_what_is_held(window: Window, server: Live) -> None:
    """Of each message and of all, by one definition; there is no other share."""
    window.visit(f"{server.url}/")
    definition = window.run("document.getElementById('definition').textContent.replace(/\\s+/g, ' ')")
    assert definition.startswith("Held: of all entries that the text would have in the cache")
    assert not window.run("document.getElementById('definition').checkVisibility()")
    for turn in (1, 2):
        window.ask("w5 w6")
        assert window.texts(".held-of") == ["60 % held"] * (2 * turn - 1) + [""], "nothing is known of the last answer"
    titles = window.run("[...document.querySelectorAll('.held-of')].map((e) => e.title)")
    assert titles == [definition] * 3 + [""]
    width = window.run("getComputedStyle(document.querySelector('.held-of')).backgroundSize")
    assert width.startswith(("calc(60%", "60%"))
    shares = re.findall(r"[\d.]+ %[^·;,\n]*", window.run("document.body.innerText"))
    assert len(shares) == 4
    assert all(re.fullmatch(r"\d+ % held", share) for share in shares), shares
    window.click(".what")
    assert window.run("document.getElementById('definition').checkVisibility()")
    window.press("Escape")
    window.wait("!document.getElementById('definition').checkVisibility()")
    usual, server.llm.forgotten = (
        server.llm.forgotten,
        lambda request: tuple(Forgotten(begin, end, 0.0, 0.1, 0.997) for begin, end in request.marks.report),
    )
    try:
        window.ask("w7")
        assert window.texts(".held-of")[0] == "99.7 % held", "what lacks a little is not all"
    finally:
        server.llm.forgotten = usual


@in_browser
def test_a_server_that_cannot_tell_answers_without(window: Window, server: Live) -> None:
    window.visit(f"{server.url}/")
    window.run("""const told = window.told = [], send = window.fetch; window.fetch = (path, options) => {
      if (!String(path).endsWith("chat/completions")) return send(path, options);
      const body = JSON.parse(options.body);
      told.push(body.millpond.forgotten ?? false);
      if (!body.millpond.forgotten) return send(path, options);
      const error = { message: "no", param: "millpond.forgotten" };
      return Promise.resolve(new Response(JSON.stringify({ error }), { status: 400 }));
    }""")
    for turn in (1, 2):
        window.type("w5")
        window.enter()
        window.wait(answered(turn))
    assert window.run("told") == [True, False, False]
    assert window.run("document.querySelectorAll('.error').length") == 0


@in_browser
def test_answers_are_shown_as_markdown_and_nothing_in_them_runs(window: Window, server: Live) -> None:
    told = "**bold** <img src=x onerror=alert(1)>\n\n- one\n- two\n\n```\ncode\n```\n[evil](javascript:alert(1))"
    usual, server.llm.text = server.llm.text, lambda ids: told if len(ids) > 2 else told[: 4 * len(ids)]
    try:
        window.visit(f"{server.url}/")
        window.type("w5")
        window.enter()
        window.wait("document.querySelector('.assistant li') && !document.getElementById('send').disabled")
        shape = "[...document.querySelector('.assistant').children].map((e) => e.tagName).join()"
        assert window.run(shape) == "P,UL,FIGURE,P"
        assert window.run("document.querySelector('.assistant strong').textContent") == "bold"
        assert "<img src=x" in window.run("document.querySelector('.assistant p').textContent")
        assert window.run("document.querySelectorAll('.assistant :is(img, a)').length") == 0
        window.type("w6")
        window.enter()
        window.wait("document.querySelectorAll('.assistant').length === 2 && !document.getElementById('send').disabled")
        assert server.llm.asked[-1].prompt  # what goes back is the text, not what was made of it
    finally:
        server.llm.text = usual


@in_browser
def test_header_and_placeholders_follow_the_chats_own_settings(window: Window, server: Live) -> None:
    window.visit(f"{server.url}/")

    def choose(name: str, value: str) -> tuple[str, str]:
        window.run(
            f"document.getElementById({name!r}).value = {value!r};"
            f"document.getElementById({name!r}).dispatchEvent(new Event('input', {{bubbles: true}}))"
        )
        shown = window.run("document.getElementById('about').textContent")
        return str(shown), str(window.run("document.getElementById('budget').placeholder"))

    assert choose("codec", "") == ("h2o · budget 20% · context 64", "20%")
    assert choose("method", "snapkv") == ("snapkv · budget 20% · context 64", "20%")
    assert choose("budget", "64") == ("snapkv · budget 64 · context 64", "20%")
    assert choose("method", "full") == ("full · context 64", "none")
    usual = "20%, at least 512"
    assert choose("preset", "tiny") == (f"tiny · ada · budget {usual} · rotated4 · context 64", usual)
    assert window.run("document.getElementById('method').disabled")
    window.type("w5")
    window.enter()
    window.wait(BEGUN)
    assert server.llm.asked[-1].cache.preset == "tiny"
    window.wait(answered(1))


@in_browser
def test_an_empty_chat_says_what_to_do(window: Window, server: Live) -> None:
    window.visit(f"{server.url}/")
    assert window.run("document.getElementById('empty').checkVisibility()")
    assert "Ask something" in window.run("document.getElementById('empty').textContent")
    window.type("w5")
    window.enter()
    window.wait("document.querySelector('.assistant') !== null && !document.getElementById('send').disabled")
    assert not window.run("document.getElementById('empty').checkVisibility()")
    window.run("document.getElementById('fresh').click()")
    assert window.run("document.getElementById('empty').checkVisibility()")


@in_browser
def test_the_panel_follows_the_newest_tokens_unless_a_person_looks_back(window: Window, server: Live) -> None:
    window.visit(f"{server.url}/")
    made = """
      import("./page/memory.js").then(({ MemoryView }) => {
        const view = window.view = new MemoryView(() => "");
        const box = document.getElementById("text");
        box.style.cssText = "max-height: 6rem; min-height: 0; flex: none";
        view.append(Array(400).fill("word "));
        window.first = box.scrollTop + box.clientHeight >= box.scrollHeight - 2;
        view.append(Array(400).fill("more "));
        window.second = box.scrollTop + box.clientHeight >= box.scrollHeight - 2;
        box.scrollTop = 0;
        view.append(Array(400).fill("last "));
        window.third = box.scrollTop;
      })"""
    window.run(made)
    window.wait("window.third !== undefined")
    assert window.run("[window.first, window.second, window.third]") == [True, True, 0]


@in_browser
def test_a_phone_sees_no_keys(window: Window, server: Live) -> None:
    window.visit(f"{server.url}/")
    assert window.run("document.querySelector('footer').checkVisibility()")
    window.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=2, mobile=True)
    try:
        window.wait("!document.querySelector('footer').checkVisibility()")
        assert window.run("document.documentElement.scrollWidth") <= 390
    finally:
        window.call("Emulation.setDeviceMetricsOverride", width=1360, height=900, deviceScaleFactor=1, mobile=False)


@in_browser
def test_a_request_that_waits_is_no_failed_one(window: Window, server: Live) -> None:
    """Nothing is held while a request waits: the page is told so, and the browser notes no error."""
    usual = server.llm.memory
    looks: list[str] = []

    async def nothing(request_id: str, layer: int, client: str | None = None) -> None:
        looks.append(request_id)

    server.llm.memory = nothing
    server.llm.open.clear()
    server.llm.free = 1
    try:
        window.visit(f"{server.url}/")
        window.type("w5")
        window.enter()
        until(lambda: len(looks) > 2)
        server.llm.memory = usual
        server.llm.free = 0
        server.soon(server.llm.open.set)
        window.wait("document.querySelectorAll('#text .t').length === 4 && !document.getElementById('send').disabled")
    finally:
        server.llm.memory = usual
        server.llm.free = 0
        server.soon(server.llm.open.set)


@in_browser
def test_the_keyboard_leads_through_layers_and_tokens(window: Window, server: Live) -> None:
    window.visit(f"{server.url}/")
    window.type("w9")
    window.enter()
    window.wait("document.querySelectorAll('#text .t').length === 4 && !document.getElementById('send').disabled")
    window.run("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowDown', altKey: true, bubbles: true}))")
    assert window.run("document.getElementById('layer').value") == "1"
    window.run("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowDown', altKey: true, bubbles: true}))")
    assert window.run("document.getElementById('layer').value") == "1"  # there is no further one
    window.run("document.getElementById('text').focus()")
    for _ in range(3):
        window.press("ArrowRight")
    assert (
        window.run("document.getElementById('token').textContent") == "position 2 · held by 1 of 2 heads · score 0.3333"
    )
    window.run("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'n', altKey: true, bubbles: true}))")
    assert window.run("document.querySelectorAll('#log > *, #text > *').length") == 0


@in_browser
def test_escape_stops_and_frees(window: Window, server: Live) -> None:
    server.llm.open.clear()
    server.llm.free = 2
    try:
        window.visit(f"{server.url}/")
        window.type("w5")
        window.enter()
        window.wait(BEGUN)
        window.run("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape', bubbles: true}))")
        window.wait("!document.getElementById('send').disabled")
        assert window.run("document.querySelectorAll('.error').length") == 0
        until(lambda: list(server.llm.ended.values())[-1] == "closed")
    finally:
        server.llm.free = 0
        server.soon(server.llm.open.set)


@in_browser
def test_what_is_chosen_is_sent_and_refusals_are_shown(window: Window, server: Live) -> None:
    window.visit(f"{server.url}/")
    window.run("document.getElementById('method').value = 'h20'")
    window.type("w5")
    window.enter()
    window.wait("document.querySelector('.error') !== null")
    window.problems[:] = [problem for problem in window.problems if "400" not in problem]  # the browser's own note
    assert "did you mean 'h2o'" in window.run("document.querySelector('.error').textContent")
    window.run("document.getElementById('method').value = 'snapkv'; document.getElementById('budget').value = '64'")
    window.type("w5")
    window.enter()
    window.wait(BEGUN)
    cache = server.llm.asked[-1].cache
    assert (cache.method, cache.budget) == ("snapkv", "64")
    assert window.run("[...document.querySelectorAll('.user')].map((m) => m.textContent)") == ["w5", "w5"]
    window.wait(answered(1))


@in_browser
def test_a_server_with_keys_asks_for_one(window: Window) -> None:
    with live(FakeLLM, api_keys=("secret",)) as server:
        window.allowed = server.url
        window.call("Page.navigate", url=f"{server.url}/")
        window.wait("document.getElementById('key-row')?.hidden === false")  # before anything is refused
        assert window.run("document.activeElement.id") == "key"
        window.type("secret")
        window.call("Input.dispatchKeyEvent", type="keyDown", key="Tab", windowsVirtualKeyCode=9)
        window.wait("document.getElementById('model').textContent === 'fake/counter'")


@in_browser
def test_the_picture_in_the_docs_can_be_taken(tmp_path: Path) -> None:
    taken, shown = tmp_path / "page.png", Path(__file__).parents[2] / "docs" / "images" / "page.png"
    take(taken, "pond-text")  # which every checkout has
    for picture in (taken, shown):
        content = picture.read_bytes()
        assert content.startswith(b"\x89PNG")
        assert (int.from_bytes(content[16:20]), int.from_bytes(content[20:24])) == (WIDTH, HEIGHT)
        assert 20_000 < len(content) < 150_000
