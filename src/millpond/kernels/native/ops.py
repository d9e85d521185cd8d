"""`decode`, `prefill`, `write`, `read` and `linear` as in `ops`, and their registration with torch.

millpond::decode and its siblings are what torch.compile sees; eager calls skip the dispatcher. Page memory is reached
through `bases` (a table of addresses), so `bases` is what the schemas declare as written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millpond.kernels.decode_rules import DecodeRule, Reduce
from millpond.kernels.eager.attend import nothing_found
from millpond.kernels.native import abi, decoder_rows
from millpond.kernels.pages import PageArrays

LIBRARY = torch.library.Library("millpond", "DEF")
LIBRARY.define(
    "decode(Tensor q, Tensor k_new, Tensor v_new, Tensor(a!) bases, Tensor table, Tensor(b!) lens, Tensor caps, "
    "Tensor recent, Tensor q_pos, Tensor? sink_logits, int[] pool, int[] rule, int window, float scale, "
    "float softcap, float decay) -> (Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "prefill(Tensor q, Tensor k, Tensor v, Tensor q_pos, Tensor? past_pos, Tensor? past_log_masses, "
    "Tensor? sink_logits, int window, float scale, float softcap, int colsum, float decay) -> (Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "write(Tensor(a!) bases, Tensor table, Tensor start, Tensor count, Tensor index, Tensor keys, Tensor values, "
    "Tensor positions, Tensor? scores, Tensor? log_masses, int[] pool) -> ()"
)
LIBRARY.define(
    "read(Tensor bases, Tensor table, Tensor lens, int width, int[] pool) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
LIBRARY.impl("decode", abi.decode, "CPU")
LIBRARY.impl("prefill", abi.prefill, "CPU")
LIBRARY.impl("write", abi.write, "CPU")
LIBRARY.impl("read", abi.read, "CPU")
LIBRARY.impl("linear", decoder_rows.linear, "CPU")


@torch.library.register_fake("millpond::decode", lib=LIBRARY)
def _decode_shapes(
    q: Tensor, k_new: Tensor, v_new: Tensor, bases: Tensor, table: Tensor, lens: Tensor, caps: Tensor, recent: Tensor,
    q_pos: Tensor, sink_logits: Tensor | None, pool: list[int], rule: list[int], window: int,
    scale: float, softcap: float, decay: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    n_seq, n_heads, _ = q.shape
    out = q.new_empty((n_seq, n_heads, pool[3]))
    lse = q.new_empty((n_seq, n_heads), dtype=torch.float32)
    return out, lse, q.new_empty((n_seq * k_new.shape[1],), dtype=torch.int32)


@torch.library.register_fake("millpond::prefill", lib=LIBRARY)
def _prefill_shapes(
    q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, past_pos: Tensor | None, past_log_masses: Tensor | None,
    sink_logits: Tensor | None, window: int, scale: float, softcap: float, colsum: int, decay: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    sums = v.shape[:2] if colsum >= 0 else (0, 0)
    return (
        q.new_empty((*q.shape[:2], v.shape[-1])),
        q.new_empty(q.shape[:2], dtype=torch.float32),
        q.new_empty(sums, dtype=torch.float32),
    )


@torch.library.register_fake("millpond::write", lib=LIBRARY)
def _write_shapes(
    bases: Tensor, table: Tensor, start: Tensor, count: Tensor, index: Tensor, keys: Tensor, values: Tensor,
    positions: Tensor, scores: Tensor | None, log_masses: Tensor | None, pool: list[int],
) -> None:  # fmt: skip
    return None


@torch.library.register_fake("millpond::read", lib=LIBRARY)
def _read_shapes(
    bases: Tensor, table: Tensor, lens: Tensor, width: int, pool: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    n, dtype = table.shape[0], abi.TORCH_DTYPES[pool[4]]
    keys = bases.new_empty((n, width, pool[2]), dtype=dtype)
    values = bases.new_empty((n, width, pool[3]), dtype=dtype)
    positions = bases.new_empty((n, width), dtype=torch.int32)
    scores = bases.new_empty((n, width), dtype=torch.float32)
    return keys, values, positions, scores, bases.new_empty((n, width) if pool[5] else (0, 0), dtype=torch.float32)


@torch.library.register_fake("millpond::linear", lib=LIBRARY)
def _linear_shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def pool_numbers(pages: PageArrays) -> list[int]:
    """A pool as the schemas take it, where it lies apart."""
    dtype = abi.DTYPES[pages.dtype]
    return [pages.pages_per_arena, pages.slots, pages.key_dim, pages.value_dim, dtype, int(pages.masses)]


def rule_numbers(rule: DecodeRule) -> list[int]:
    """A rule as the schemas take it, its decay apart."""
    kinds, spacing = [int(rule.signal), int(rule.reduce), int(rule.evict)], rule.spacing
    return [*kinds, rule.sinks, int(rule.shared), rule.seed & 0xFFFFFFFF, spacing.width, spacing.shift, spacing.stride]


def decode(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    pages: PageArrays,
    table: Tensor,
    lens: Tensor,
    caps: Tensor,
    recent: Tensor,
    q_pos: Tensor,
    rule: DecodeRule,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    call = torch.ops.millpond.decode.default if torch.compiler.is_compiling() else abi.decode
    result: tuple[Tensor, Tensor, Tensor] = call(
        q, k_new, v_new, pages.bases, table, lens, caps, recent, q_pos, sink_logits,
        pool_numbers(pages), rule_numbers(rule), window, scale, softcap, rule.decay,
    )  # fmt: skip
    return result


def attend(
    q: Tensor,
    pages: PageArrays,
    table: Tensor,
    lens: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    members: Tensor | None = None,
    found: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    members = torch.arange(len(q)) if members is None else members
    out, lse = nothing_found(q, pages.value_dim) if found is None else found
    abi.attend(q, pages.bases, table, lens, members, out, lse, pool_numbers(pages), scale, softcap)
    return out, lse


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_pos: Tensor,
    past_pos: Tensor | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    sink_logits: Tensor | None = None,
    colsum: Reduce | None = None,
    decay: float = 1.0,
    past_log_masses: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    call = torch.ops.millpond.prefill.default if torch.compiler.is_compiling() else abi.prefill
    out, lse, sums = call(
        q, k, v, q_pos, past_pos, past_log_masses, sink_logits, window, scale, softcap,
        -1 if colsum is None else int(colsum), decay,
    )  # fmt: skip
    return out, lse, sums if colsum is not None else None


def window_signal(
    q: Tensor,
    k: Tensor,
    q_pos: Tensor,
    k_pos: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    sink_logits: Tensor | None = None,
    reduce: Reduce = Reduce.MEAN,
    log_masses: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    return abi.window_signal(q, k, q_pos, k_pos, log_masses, sink_logits, lse, window, scale, softcap, int(reduce))


def write(
    pages: PageArrays,
    table: Tensor,
    start: Tensor,
    count: Tensor,
    index: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    scores: Tensor | None = None,
    log_masses: Tensor | None = None,
) -> None:
    call = torch.ops.millpond.write.default if torch.compiler.is_compiling() else abi.write
    call(pages.bases, table, start, count, index, keys, values, positions, scores, log_masses, pool_numbers(pages))


def read(
    pages: PageArrays, table: Tensor, lens: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    call = torch.ops.millpond.read.default if torch.compiler.is_compiling() else abi.read
    keys, values, positions, scores, log_masses = call(pages.bases, table, lens, width, pool_numbers(pages))
    return keys, values, positions, scores, log_masses if pages.masses else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    call = torch.ops.millpond.linear.default if torch.compiler.is_compiling() else decoder_rows.linear
    result: Tensor = call(x, weight, bias)
    return result
