from collections import Counter
from types import SimpleNamespace

import pytest

from millpond import UnsupportedModelError
from millpond_vllm import model_report
from millpond_vllm.methods import NEAREST
from millpond_vllm.model_report import layers_by_kind, method_refusals, report

ENTRY = 512


def reported(monkeypatch, given=None, tokens=1000, refused=None, **text):
    """Report on a text configuration, whose entries take 512 bytes a layer and whose blocks have 16 tokens."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=4, **text)),
        cache_config=SimpleNamespace(block_size=16),
    )

    def check(_):
        if refused:
            raise UnsupportedModelError(refused)

    monkeypatch.setattr(model_report, "check_engine", check)
    monkeypatch.setattr(model_report.compat, "vllm_version", lambda: "0.32.0")
    monkeypatch.setattr(model_report, "backend_name", lambda _: "CPU_ATTN")
    monkeypatch.setattr(model_report.compat, "bytes_of_entry", lambda _: ENTRY)
    return report(config, given or {"method": "snapkv", "budget": "20%", "recent": 32}, tokens)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ({}, {"full_attention": 4}),
        ({"sliding_window": 128}, {"sliding_attention": 4}),
        ({"sliding_window": 128, "use_sliding_window": False}, {"full_attention": 4}),
        (
            {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 2},
            {"sliding_attention": 2, "full_attention": 2},
        ),
        ({"layers_block_type": ["mamba", "attention"]}, {"mamba": 1, "attention": 1}),
    ],
)
def test_layers_are_counted_by_kind(text, kinds):
    assert layers_by_kind(SimpleNamespace(num_hidden_layers=4, **text)) == Counter(kinds)


def test_bytes_of_a_full_model(monkeypatch):
    found = reported(monkeypatch).bytes
    # 1,000 tokens are 60 blocks of 16 in front of the newest 32; (200 - 32) // 16 = 10 of them stay
    assert found.full == 4 * 1000 * ENTRY
    assert found.kept == 4 * (1000 - 50 * 16) * ENTRY
    assert found.share == 1.0


def test_layers_of_a_window_keep_their_bytes(monkeypatch):
    kinds = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
    found = reported(monkeypatch, sliding_window=100, layer_types=kinds)
    assert (found.bytes.full, found.bytes.window) == (1000 * ENTRY, 3 * 100 * ENTRY)
    assert found.bytes.share == pytest.approx(1000 / 1300)
    assert not found.refusals


def test_a_short_text_is_not_counted_as_evicted(monkeypatch):
    found = reported(monkeypatch, tokens=40).bytes
    assert found.kept == found.full


def test_all_refusals_are_listed(monkeypatch):
    given = {"method": "snapkv", "budget": 40, "recent": 32}
    found = reported(monkeypatch, given, refused="a KV connector", num_kv_shared_layers=2, sliding_window=8)
    assert [text.split(";")[0].split(" of 16")[0] for text in found.refusals] == [
        "a KV connector",
        "budget 40 leaves no block",
        "no layer of this model caches every token: there is nothing to evict from",
        "the last 2 layers share the entries of earlier ones, and would have no say in what is kept",
    ]


def test_changes_of_the_method_are_told(monkeypatch):
    assert [one.part for one in reported(monkeypatch, {"method": "ada", "budget": "20%"}).changes] == ["heads"]


def test_every_method_is_said_to_act_or_why_not():
    found = method_refusals()
    for name in NEAREST.replace(" or ", ", ").split(", "):
        assert found[name] is None, name
    assert "merge" in found["d2o"]
