"""Process that compiles grammars, each in a child that may be killed; run as a file.

Native code in a thread can be neither interrupted nor held to an amount of memory; a process can. This one imports
xgrammar once and forks for each grammar, so that a child begins in milliseconds, and kills children that take too long
or whose caller is gone. It imports nothing of Millpond, which would take seconds.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

#: First byte of a reply, before its length: a grammar, a refusal with its reason, a tokenizer must be sent first.
MADE, REFUSED, UNKNOWN = b"+", b"-", b"?"
HEAD = struct.Struct(">cQ")
#: Seconds between two checks of the children.
_LOOK_S = 0.02
_MAX_TOKENIZERS = 4
#: Beginning of xgrammar's errors: the time, the position in its source, the condition that did not hold there.
_ERROR_HEAD = re.compile(r"^\[[\d:]+\] \S+:\d+: (Check failed: \(.*?\) is false: )?")


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """Limits of one grammar.

    Attributes:
        cpu_seconds: Processor time, however long that takes on a busy machine.
        memory_bytes: Memory beyond that at the start.
        result_bytes: Size of the grammar when it is returned.
        clock_seconds: Time on the clock after which a process that does nothing is killed.
    """

    cpu_seconds: int
    memory_bytes: int
    result_bytes: int
    clock_seconds: float = 600.0


@dataclass(slots=True)
class _Child:
    pid: int
    wire: socket.socket
    ends: float
    limits: CompileLimits


def main() -> None:
    """Serve until the other end of the socket with the number in `sys.argv` is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's business
    control = socket.socket(fileno=int(sys.argv[1]))
    import xgrammar

    tokenizers: dict[str, Any] = {}
    children: list[_Child] = []
    while True:
        sockets = [control, *(child.wire for child in children)]
        ready, _, _ = select.select(sockets, [], [], _LOOK_S if children else None)
        for child in list(children):
            _look_after(child, children, caller_gone=child.wire in ready)
        if control in ready:
            _, wires, _, _ = socket.recv_fds(control, 1, 1)
            if not wires:  # the caller is gone
                for child in children:
                    os.kill(child.pid, signal.SIGKILL)
                return
            _begin(socket.socket(fileno=wires[0]), tokenizers, children, xgrammar, control)


def _look_after(child: _Child, children: list[_Child], caller_gone: bool) -> None:
    """Kill a child that timed out or whose caller is gone; report one that died silently."""
    is_late = time.monotonic() > child.ends
    if is_late or caller_gone:
        os.kill(child.pid, signal.SIGKILL)
    pid, status = os.waitpid(child.pid, 0 if is_late or caller_gone else os.WNOHANG)
    if pid == 0:
        return
    children.remove(child)
    if status:
        signal_number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if signal_number == signal.SIGXCPU:
            reason = f"more than {child.limits.cpu_seconds} s of a processor"
        elif is_late:
            reason = f"more than {child.limits.clock_seconds:g} s"
        else:
            reason = f"more than {child.limits.memory_bytes >> 20} MiB"
        _send(child.wire, REFUSED, f"it takes {reason} to compile".encode())
    child.wire.close()


def _begin(
    wire: socket.socket, tokenizers: dict[str, Any], children: list[_Child], xgrammar: Any, control: socket.socket
) -> None:
    try:
        message = json.loads(receive(wire))
        name = message["tokenizer"]
        if name not in tokenizers:
            _send(wire, UNKNOWN, b"")
            tokenizers[name] = xgrammar.TokenizerInfo.deserialize_json(receive(wire).decode())
            if len(tokenizers) > _MAX_TOKENIZERS:
                del tokenizers[next(iter(tokenizers))]
    except (OSError, EOFError):
        wire.close()
        return
    limits = CompileLimits(**message["limits"])
    pid = os.fork()
    if pid:
        children.append(_Child(pid, wire, time.monotonic() + limits.clock_seconds, limits))
        return
    code = 1
    try:
        control.close()
        _confine(limits)
        code = _compile(wire, message["spec"], tokenizers[name], limits, xgrammar)
    finally:
        os._exit(code)


def _confine(limits: CompileLimits) -> None:
    import resource  # which Windows has not, and nor has it fork

    os.nice(5)  # those whose answers are in flight go first
    with open("/proc/self/statm") if os.path.exists("/proc/self/statm") else open(os.devnull) as statm:
        pages = statm.read().split()
    if pages:
        size = int(pages[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (size + limits.memory_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_seconds, limits.cpu_seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _compile(wire: socket.socket, spec: dict[str, Any], tokenizer: Any, limits: CompileLimits, xgrammar: Any) -> int:
    """Compile a grammar, send it, and return the exit status of the child."""
    compiler = xgrammar.GrammarCompiler(tokenizer, max_threads=1, cache_enabled=False)
    kind, value = spec["kind"], spec["value"]
    try:
        if kind == "json_schema":
            compiled = compiler.compile_json_schema(json.dumps(value), max_whitespace_cnt=spec["most_blanks"])
        elif kind == "regex":
            compiled = compiler.compile_regex(value)
        elif kind == "grammar":
            compiled = compiler.compile_grammar(value)
        else:
            compiled = compiler.compile_structural_tag({"type": "structural_tag", "format": value})
        first_mask = xgrammar.allocate_token_bitmask(1, tokenizer.vocab_size)
        if xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(first_mask, 0) and not first_mask.any():
            _send(wire, REFUSED, b"no answer can follow it")
            return 0
        serialized = compiled.serialize_json().encode()
    except MemoryError:
        return 1
    except Exception as error:  # xgrammar's own types are not public
        if "bad_alloc" in str(error):
            return 1
        _send(wire, REFUSED, _reason(error).encode())
        return 0
    if len(serialized) > limits.result_bytes:
        reason = f"its grammar takes {len(serialized):,} bytes, and may take {limits.result_bytes:,}"
        _send(wire, REFUSED, reason.encode())
        return 0
    _send(wire, MADE, serialized)
    return 0


def _reason(error: Exception) -> str:
    """Return the text of xgrammar's error, without the time and the position in its source."""
    lines = str(error).strip().splitlines()
    return _ERROR_HEAD.sub("", lines[-1]) if lines else type(error).__name__


def _send(wire: socket.socket, kind: bytes, data: bytes) -> None:
    with suppress(OSError):  # the caller is gone
        wire.sendall(HEAD.pack(kind, len(data)) + data)


def receive(wire: socket.socket) -> bytes:
    """Return the next message of the caller: its length, then its bytes.

    Raises:
        EOFError: the other end was closed.
    """
    (length,) = struct.unpack(">Q", exactly(wire, 8))
    return exactly(wire, length)


def exactly(wire: socket.socket, length: int) -> bytes:
    """Read `length` bytes.

    Raises:
        EOFError: the other end was closed before.
    """
    parts = bytearray()
    while len(parts) < length:
        part = wire.recv(min(length - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


if __name__ == "__main__":
    main()
