"""Models whose layers cannot evict are refused when they are loaded, with the reason and what works."""

from types import SimpleNamespace

import pytest

from millpond import UnsupportedModelError
from millpond_vllm.engine_check import check_layers
from millpond_vllm.settings import EngineSettings


def layer(backend="FLASH_ATTN", shows=True, impl=None, **changes):
    """Return a layer of full attention that can evict, with changes."""
    impl = SimpleNamespace(**({"shows_queries": True} if shows else {}), **(impl or {}))
    given = {
        "sliding_window": None,
        "kv_sharing_target_layer_name": None,
        "attn_type": "decoder",
        "use_mm_prefix": False,
        "head_size": 64,
        "head_size_v": 64,
        "kv_cache_dtype": "auto",
        **changes,
    }
    return SimpleNamespace(impl=impl, attn_backend=SimpleNamespace(get_name=lambda: backend), **given)


def check(layers, method="snapkv", unified=False):
    config = SimpleNamespace(scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=unified))
    named = {f"model.layers.{index}.attn": one for index, one in enumerate(layers)}
    check_layers(named, config, EngineSettings.parse({"method": method, "budget": 512}).policy())


REFUSED = {
    "ALiBi": (layer(impl={"alibi_slopes": [0.5]}), "bias by distance"),
    "encoder": (layer(attn_type="encoder_only"), "attends as encoder_only"),
    "images": (layer(use_mm_prefix=True), "--language-model-only"),
    "widths": (layer(head_size_v=128), "another width"),
    "backend": (layer("FLEX_ATTENTION", shows=False), "give --attention-backend FLASH_ATTN"),
    "dtype": (layer(kv_cache_dtype="int8_per_token_head"), "give --kv-cache-dtype auto or fp8"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_layer_that_cannot_evict_is_refused(kind):
    bad, says = REFUSED[kind]
    with pytest.raises(UnsupportedModelError, match=says) as error:
        check([layer(), bad])
    assert "model.layers.1.attn" in str(error.value)
    bad.sliding_window = 128
    check([layer(), bad])  # windowed layers are left as they are


def test_layers_that_share_entries_are_refused():
    shares = layer(kv_sharing_target_layer_name="model.layers.0.attn")
    with pytest.raises(UnsupportedModelError, match="shares its entries"):
        check([layer(), shares])
    shares.sliding_window = 128
    with pytest.raises(UnsupportedModelError, match="shares its entries"):
        check([layer(), shares])
    check([layer(sliding_window=128), shares, layer()])  # windowed ones share among themselves


def test_sums_need_entries_that_they_can_read():
    bad = layer(kv_cache_dtype="fp8")
    check([bad])
    with pytest.raises(UnsupportedModelError, match="snapkv"):
        check([bad], method="h2o")


def test_windows_in_the_same_blocks_are_refused():
    check([layer(), layer(sliding_window=128)])
    with pytest.raises(UnsupportedModelError, match="disable-hybrid-kv-cache-manager"):
        check([layer(), layer(sliding_window=128)], unified=True)
    check([layer(), layer()], unified=True)
