"""All layers in one native call: the same bits as layer by layer, and the same entries behind it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millpond.kernels import native
from millpond.kernels.args import AttentionShape, PageRegions, StepRegions
from millpond.kernels.decode_rules import KEEP_ALL, DecodeRule, Evict, Signal
from millpond.kernels.decoder_ops import GatedActivation
from millpond.kernels.native import library
from tests.helpers.examples import examples
from tests.helpers.kernels.make import Call, Case
from tests.kernels.test_rows import DTYPES, draws

pytestmark = [
    pytest.mark.skipif(not library.runnable(), reason="installed without native kernels"),
    pytest.mark.usefixtures("two_threads"),
]

WIDTH, INNER, DIM, KV_HEADS, GROUP = 40, 56, 16, 2, 3
RULES = [KEEP_ALL, DecodeRule(signal=Signal.SUM, evict=Evict.ACC, sinks=1), DecodeRule(evict=Evict.OLDEST)]


def regions(call: Call) -> StepRegions:
    case = call.case
    shape = AttentionShape(case.key_dim**-0.5, case.softcap, case.window, call.sink_logits)
    plain = PageRegions(call.pages, call.table, call.lens)
    return StepRegions(plain, call.caps, call.recent, call.q_pos, case.rule, shape)


def parts(dtype: torch.dtype, seed: int) -> tuple[native.Linears, native.Behind, list[torch.Tensor]]:
    """The matrices of a layer, and what keeps them alive."""
    draw = draws(dtype, seed)
    heads = [draw(n * DIM, WIDTH) for n in (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)]
    norms, bias, gate = [draw(WIDTH), draw(WIDTH)], draw(KV_HEADS * DIM), [draw(INNER, WIDTH), draw(INNER, WIDTH)]
    out, down = draw(WIDTH, KV_HEADS * GROUP * DIM), draw(WIDTH, INNER)
    into = native.Linears([(heads[0], None), (heads[1], bias), (heads[2], None)], norm=norms[0], eps=1e-5)
    up = native.Linears([(matrix, None) for matrix in gate], norm=norms[1], eps=1e-5, gate=int(GatedActivation.SILU))
    behind = native.Behind(native.Linears([(out, None)]), up, native.Linears([(down, None)]))
    return into, behind, [*heads, *norms, bias, *gate, out, down]


@given(
    m=st.integers(1, 14),
    dtype=DTYPES,
    rule=st.sampled_from(RULES),
    n_layers=st.integers(1, 3),
    window=st.sampled_from([0, 6]),
    sinks=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_call_is_layer_by_layer(
    isa: str, m: int, dtype: torch.dtype, rule: DecodeRule, n_layers: int, window: int, sinks: bool, seed: int
) -> None:
    draw, n_regions = draws(dtype, seed), m * KV_HEADS
    lens = [9 + (seed + r // KV_HEADS) % 7 for r in range(n_regions)]
    case = Case(
        lens,
        m,
        KV_HEADS,
        GROUP,
        DIM,
        DIM,
        dtype=dtype,
        rule=rule,
        window=window,
        sinks=sinks,
        caps=list(lens),
        recent=[2] * n_regions,
        softcap=30.0 * (seed % 2),
    )
    calls = [replace(case, seed=seed + layer).build() for layer in range(n_layers)]
    twins = [call.clone() for call in calls]
    layers = [parts(dtype, seed + layer) for layer in range(n_layers)]
    x, cos, sin = draw(m, WIDTH), draw(m, DIM), draw(m, DIM)
    found = x.clone()
    found_lse = native.Layers([(into, rest) for into, rest, _ in layers], DIM)(found, cos, sin, [*map(regions, twins)])
    for (into, rest, _), call, twin, sums in zip(layers, calls, twins, found_lse, strict=True):
        call.q, call.k_new, call.v_new = into.heads(x, DIM, cos, sin)
        seen, lse, _ = call.run(native)
        x = rest(seen.view(m, -1), x)
        assert torch.equal(sums, lse)
        assert torch.equal(twin.lens, call.lens)
        for ours, expected in zip(twin.contents(), call.contents(), strict=True):
            assert torch.equal(ours, expected)
    assert torch.equal(found, x)
