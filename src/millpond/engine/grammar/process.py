"""Process that compiles grammars under limits: the caller's end of `millpond.engine.grammar.worker`."""

from __future__ import annotations

import atexit
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from millpond.engine.grammar.worker import HEAD, MADE, UNKNOWN, CompileLimits, exactly
from millpond.errors import MillpondError, OptionError

#: Limits of every grammar. Texts of a limited length take longest: 2 to 5 s with the 50,257 tokens of GPT-2.
LIMITS = CompileLimits(cpu_seconds=20, memory_bytes=512 << 20, result_bytes=96 << 20)
#: Seconds that the worker has to exit.
_END_S = 2.0


class Ask:
    """One grammar to compile; another thread may cancel it."""

    def __init__(self) -> None:
        self._wire: socket.socket | None = None
        self._given_up = False
        self._lock = threading.Lock()

    def give_up(self) -> None:
        """Cancel it: the process that compiles it is killed."""
        with self._lock:
            self._given_up = True
            if self._wire is not None:
                self._wire.shutdown(socket.SHUT_RDWR)

    def begin(self, wire: socket.socket) -> None:
        """Mark it as requested over `wire`.

        Raises:
            EOFError: it was cancelled before.
        """
        with self._lock:
            if self._given_up:
                raise EOFError
            self._wire = wire

    def end(self) -> None:
        """Mark that nothing is requested any more."""
        with self._lock:
            self._wire = None


class GrammarProcess:
    """Starts the worker when it is first needed, and again if it died; safe from any thread.

    Args:
        limits: Limits of each grammar.

    Attributes:
        limits: Limits of each grammar.
    """

    def __init__(self, limits: CompileLimits = LIMITS) -> None:
        self.limits = limits
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def compile(self, spec: dict[str, Any], name: str, tokenizer: str, ask: Ask | None = None) -> str:
        """Return a compiled grammar as JSON.

        It may take seconds: do not call it in a thread that others wait for.

        Args:
            spec: Its `kind` and `value`, as the worker takes them.
            name: Name of the tokenizer.
            tokenizer: The tokenizer as JSON of xgrammar.
            ask: Handle by which another thread may cancel it.

        Raises:
            OptionError: the grammar is refused, or takes more than its limits.
            MillpondError: it was cancelled, or the worker cannot be started.
        """
        ask = ask or Ask()
        body = json.dumps({"tokenizer": name, "spec": spec, "limits": asdict(self.limits)}).encode()
        ours, theirs = socket.socketpair()
        try:
            with ours:
                with theirs:
                    ask.begin(ours)
                    self._hand_over(theirs)
                try:
                    kind, reply = self._exchange(ours, body, tokenizer)
                finally:
                    ask.end()
        except (OSError, EOFError) as error:
            raise MillpondError("compiling the grammar was cancelled, or its process ended; ask again") from error
        if kind != MADE:
            raise OptionError(reply.decode("utf-8", "replace"))
        return reply.decode()

    def close(self) -> None:
        """End the worker and all that it compiles; it starts again when it is needed."""
        with self._lock:
            self._end()

    @staticmethod
    def _exchange(wire: socket.socket, body: bytes, tokenizer: str) -> tuple[bytes, bytes]:
        wire.sendall(struct.pack(">Q", len(body)) + body)
        kind, length = HEAD.unpack(exactly(wire, HEAD.size))
        if kind == UNKNOWN:
            tokenizer_json = tokenizer.encode()
            wire.sendall(struct.pack(">Q", len(tokenizer_json)) + tokenizer_json)
            kind, length = HEAD.unpack(exactly(wire, HEAD.size))
        return kind, exactly(wire, length)

    def _hand_over(self, wire: socket.socket) -> None:
        """Give the worker its end of a connection."""
        with self._lock:
            running = self._process is not None and self._process.poll() is None and self._owner == os.getpid()
            if not running:
                self._end()
                self._start()
            assert self._control is not None, "it was started"
            socket.send_fds(self._control, [b"."], [wire.fileno()])

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        script = Path(__file__).with_name("worker.py")
        single_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # it forks
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(script), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | single_thread,
                start_new_session=True,
            )
        self._control, self._owner = ours, os.getpid()

    def _end(self) -> None:
        control, self._control = self._control, None
        process, self._process = self._process, None
        if control is not None:
            control.close()  # which ends the worker
        if process is not None and self._owner == os.getpid():
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


#: The one worker for all models of this process.
WORKER = GrammarProcess()
atexit.register(WORKER.close)
