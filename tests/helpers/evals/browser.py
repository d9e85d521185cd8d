"""A headless Chromium, driven through its debugging pipe with nothing but the standard library."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
KEYS = {
    " ": 32,
    "PageUp": 33,
    "PageDown": 34,
    "End": 35,
    "Home": 36,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "Tab": 9,
    "Escape": 27,
}
SHIFT = 8


class Browser:
    """One window. Commands go to the browser on its descriptor 3 and come back on 4, each ended by a zero byte."""

    def __init__(self, profile: Path, width: int = 1360, height: int = 900) -> None:
        assert CHROMIUM is not None
        theirs_in, self._out = map(_high, os.pipe())
        self._in, theirs_out = map(_high, os.pipe())
        command = [
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-extensions",
            "--no-first-run",
            "--disable-dev-shm-usage",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            "--disable-background-networking",
        ]
        wires = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", wires, *command],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer, self._next, self._session = b"", 0, ""
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setScrollbarsHidden", hidden=True)

    def call(self, method: str, **params: Any) -> Any:
        """One command and its answer; what the page complains of meanwhile is noted in `problems`."""
        self._next += 1
        message: dict[str, Any] = {"id": self._next, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            self._note(answer)
            if answer.get("id") == self._next:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], 30)
            chunk = os.read(self._in, 1 << 20) if ready else b""
            if not chunk:
                raise RuntimeError("the browser does not answer")
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])
        elif message.get("method") == "Network.requestWillBeSent" and not params["request"]["url"].startswith("file:"):
            self.problems.append(f"network: {params['request']['url']}")

    def open(self, page: Path, address: str = "") -> None:
        """Load a page afresh, with `address` behind its #."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=page.as_uri() + (f"#{address}" if address else ""))
        self.wait("document.readyState === 'complete' && location.protocol === 'file:'")

    def run(self, code: str) -> Any:
        """The value of a JavaScript expression."""
        done = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise RuntimeError(json.dumps(done["exceptionDetails"]))
        return done["result"].get("value")

    def wait(self, code: str, seconds: float = 10) -> None:
        """Until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(code):
            assert time.monotonic() < end, f"never true: {code}"
            time.sleep(0.02)

    def press(self, key: str, shift: bool = False) -> None:
        """One key, as from a keyboard."""
        text = key if len(key) == 1 else ""
        shared = {"key": key, "windowsVirtualKeyCode": KEYS.get(key, ord(key[0].upper())), "modifiers": SHIFT * shift}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **shared)
        self.call("Input.dispatchKeyEvent", type="keyUp", **shared)

    def move(self, selector: str) -> None:
        """The mouse over the middle of an element."""
        box = self.run(
            f"(({{x,y,width,height}}) => ({{x:x+width/2,y:y+height/2}}))"
            f"(document.querySelector({selector!r}).getBoundingClientRect())"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **box)

    def prefer(self, scheme: str) -> None:
        """Light or dark, as a person set it."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path: Path) -> None:
        """What is in the window, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._out)
        os.close(self._in)
        self._process.terminate()
        self._process.wait(10)


def _high(descriptor: int) -> int:
    """The same descriptor under a number that does not stand in the way of 3 and 4."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return moved
