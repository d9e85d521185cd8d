"""One who means harm: requests of every kind from an address of its own, and what came back.

Run as a program it makes many of them from several addresses at a time, as soon as it reads a line, and writes what
came back as JSON. Addresses tell clients of a server without keys apart, as keys do where it has some: whoever has one
shares what is due to it.

    python -m tests.helpers.server.attacker URL NUMBER SEED [quick]
"""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from urllib.parse import urlsplit

#: Seconds after which an answer is not waited for any longer.
PATIENCE_S = 60.0
#: Idle connections that one attacker holds.
MOST_HELD = 400
#: Attackers at a time, each from an address of its own, as behind a real network.
ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5")


class Attacker:
    """Sends from one address.

    Attributes:
        draw: for what is different at each request. held: connections that are open and say nothing.
    """

    def __init__(self, url: str, address: str, seed: int) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self.host, self.port = parts.hostname, parts.port
        self.draw = random.Random(seed)
        self.held: list[socket.socket] = []
        self._address = address

    def connect(self) -> socket.socket:
        """A new connection."""
        return socket.create_connection((self.host, self.port), PATIENCE_S, (self._address, 0))

    def hold(self, made: socket.socket) -> None:
        """Keep a connection open, and let the oldest of many go."""
        self.held.append(made)
        if len(self.held) > MOST_HELD:
            self.held.pop(0).close()

    def ask(self, path: str, body: bytes | str | object, kind: str = "application/json") -> int:
        """POST it; the status of the answer, which is read to its end."""
        sent = body if isinstance(body, bytes) else (body if isinstance(body, str) else json.dumps(body)).encode()
        return self.request("POST", path, sent, {"Content-Type": kind})

    def request(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> int:
        """Any request; the status of the answer."""
        made = http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE_S, source_address=(self._address, 0))
        try:
            with suppress(ConnectionResetError, BrokenPipeError):  # refused before the body was read
                made.request(method, path, body, headers or {})
            answer = made.getresponse()
            answer.read()
            return answer.status
        finally:
            made.close()

    def say(self, *pieces: bytes, listen: bool = True) -> int:
        """Send bytes as they are; the status of the first answer, 0: the server closed without one."""
        with self.connect() as made:
            with suppress(ConnectionResetError, BrokenPipeError):
                for piece in pieces:
                    made.sendall(piece)
                if not listen:
                    return 0
                made.shutdown(socket.SHUT_WR)
            return _status(made)

    def leave_after(self, body: object, n_bytes: int) -> int:
        """Ask for a completion and go away when so many bytes of the answer have come."""
        sent = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: application/json\r\n"
        with self.connect() as made:
            made.sendall(head.encode() + f"Content-Length: {len(sent)}\r\n\r\n".encode() + sent)
            found = b""
            while len(found) < n_bytes and (part := made.recv(4096)):
                found += part
        return int(found[9:12] or 0)


def _status(made: socket.socket) -> int:
    found = b""
    with suppress(ConnectionResetError):
        while len(found) < 12 and (part := made.recv(4096)):
            found += part
    return int(found[9:12]) if found.startswith(b"HTTP/1.") else 0


def attack(url: str, number: int, seed: int, kinds: list[str]) -> dict[str, dict[str, int]]:
    """Make so many requests from all addresses at a time: one of each of these kinds, then those that are short in
    turn; how often each ended in what."""
    from tests.helpers.server.attacks import ATTACKS, LONG

    short = [name for name in kinds if name not in LONG]
    todo = [*kinds, *short * -(-number // len(short))][:number]
    random.Random(seed).shuffle(todo)
    ends: dict[str, Counter[str]] = {name: Counter() for name in kinds}
    lock = threading.Lock()

    def work(attacker: Attacker) -> None:
        while True:
            with lock:
                if not todo:
                    return
                name = todo.pop()
            began = time.monotonic()
            try:
                end = str(ATTACKS[name](attacker))
            except (OSError, http.client.HTTPException) as error:
                end = type(error).__name__
            with lock:
                ends[name][end] += 1
            if (taken := time.monotonic() - began) > 5:
                print(f"{name}: {end} after {taken:.1f} s", file=sys.stderr)

    attackers = [Attacker(url, address, seed + place) for place, address in enumerate(ADDRESSES * 2)]
    threads = [threading.Thread(target=work, args=(attacker,)) for attacker in attackers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {name: dict(found) for name, found in ends.items()}


if __name__ == "__main__":
    os.nice(10)  # on another machine it would take nothing of the server's
    from tests.helpers.server.attacks import ATTACKS, LONG  # now, and not while it is measured

    print("ready", flush=True)
    sys.stdin.readline()
    chosen = [name for name in ATTACKS if name not in LONG or "quick" not in sys.argv]
    json.dump(attack(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), chosen), sys.stdout)
