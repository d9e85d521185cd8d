"""One model in many threads: every pass gives what it gives alone, or an error says what two threads cannot share."""

import importlib
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

import millpond as mp
from millpond.registry import Registry
from tests.helpers.hf.families import family, generate, left_padded, one

PROMPTS = [one(15, seed=1), left_padded([11, 18], seed=2)]
STEPS = 8
WAIT = 20  # seconds; reached only where something hangs


def together(*tasks: Callable):
    """Run tasks in a thread each; their results, or the first error."""
    with ThreadPoolExecutor(len(tasks)) as pool:
        return [future.result(WAIT) for future in [pool.submit(task) for task in tasks]]


@contextmanager
def side_by_side(model, n):
    """All n threads are inside a pass of the model at once, each time."""
    meet = threading.Barrier(n, timeout=WAIT)

    def wait(*_):
        meet.wait()

    hooks = [layer.register_forward_pre_hook(wait) for layer in model.model.layers]
    yield
    for hook in hooks:
        hook.remove()


@pytest.mark.covering
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("method", ["full", "h2o", "streaming"])
def test_two_caches_on_one_model(name, method):
    model = family(name).make()

    def answer(prompt):
        with mp.compress(model, method, None if method == "full" else 8) as cache:
            return generate(model, prompt, STEPS, cache=cache)

    alone = [answer(prompt) for prompt in PROMPTS]
    with side_by_side(model, 2):
        found = together(*(lambda prompt=prompt: answer(prompt) for prompt in PROMPTS))
    assert all(map(torch.equal, found, alone))
    assert model.config._attn_implementation != "millpond"


@pytest.mark.covering
@pytest.mark.parametrize("method", ["h2o", "sirllm", "kvzip"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_stock_generate_beside_a_cache(name, method):
    model = family(name).make()
    options = {"sirllm": {}, "kvzip": {"ask": "5;6"}}.get(method, {})

    def ours():
        with mp.compress(model, method, 8, **options) as cache:
            return generate(model, PROMPTS[0], STEPS, cache=cache)

    def stock():
        return generate(model, PROMPTS[1], STEPS)

    alone = [ours(), stock()]
    meetings = {"kvzip": 0}.get(method, 2)  # kvzip passes the model more often
    with side_by_side(model, meetings or 1):
        found = together(ours, stock)
    assert all(map(torch.equal, found, alone))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("what", ["opened", "closed"])
def test_a_stock_pass_goes_on_through_a_switch(what, implementation):
    """A cache is made, or closed, while another thread is in the middle of a prompt."""
    model, prompt = family("llama").make(attn_implementation=implementation), left_padded([19, 26, 13])
    with torch.no_grad():
        expected = model(**prompt).logits
        inside, go_on = threading.Event(), threading.Event()

        def hold(*_):
            inside.set()
            assert go_on.wait(WAIT)

        hook = model.model.layers[1].register_forward_pre_hook(hold)
        cache = mp.compress(model, "full") if what == "closed" else None

        def stock():
            with torch.no_grad():
                return model(**prompt).logits

        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(stock)
            assert inside.wait(WAIT)
            if cache is not None:
                cache.close()
                assert model.config._attn_implementation == implementation
            else:
                cache = mp.compress(model, "full")
            go_on.set()
            found = running.result(WAIT)
        hook.remove()
        cache.close()
    real = prompt["attention_mask"].bool()
    torch.testing.assert_close(found[real], expected[real], atol=1e-5, rtol=0)


def test_one_cache_in_two_threads_is_refused():
    model = family("llama").make()
    expected = generate(model, PROMPTS[0], STEPS)
    inside, go_on = threading.Event(), threading.Event()

    def hold(*_):
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert go_on.wait(WAIT)

    hook = model.model.layers[1].register_forward_pre_hook(hold)
    with mp.compress(model, "full") as cache, ThreadPoolExecutor(1, thread_name_prefix="first") as pool:
        running = pool.submit(generate, model, PROMPTS[0], STEPS, cache=cache)
        assert inside.wait(WAIT)
        with pytest.raises(mp.CacheMismatchError, match=r"in a pass of the thread 'first_0'.*one cache per thread"):
            generate(model, PROMPTS[0], STEPS, cache=cache)
        with pytest.raises(mp.CacheMismatchError, match="in a pass of the thread 'first_0'"):
            cache.reset()
        go_on.set()
        assert torch.equal(running.result(WAIT), expected)
        cache.check_integrity()
        cache.reset()
        assert torch.equal(generate(model, PROMPTS[0], STEPS, cache=cache), expected)
    hook.remove()


def test_a_cache_may_go_from_thread_to_thread():
    model, prompt = family("llama").make(), PROMPTS[0]
    expected = generate(model, prompt, 2 * STEPS)
    with mp.compress(model, "full") as cache:
        first = together(lambda: generate(model, prompt, STEPS, cache=cache))[0]
        later = {"input_ids": first, "attention_mask": torch.ones_like(first)}
        found = generate(model, later, STEPS, cache=cache)
    assert torch.equal(found, expected)


def test_models_are_compressed_in_many_threads():
    """Thirty times four models at once: each comes and goes without the others."""
    models = [family(name).make() for name in ("llama", "llama", "qwen3", "gemma2")]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def work(model):
        for _ in range(30):
            mp.compress(model, "h2o", 8).close()
        return model.config._attn_implementation

    try:
        assert together(*(lambda model=model: work(model) for model in models)) == ["sdpa"] * 3 + ["eager"]
    finally:
        sys.setswitchinterval(before)


def test_one_model_is_compressed_in_many_threads():
    model, before = family("llama").make(), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def work():
        for _ in range(20):
            mp.compress(model, "h2o", 8).close()

    try:
        together(*[work] * 4)
    finally:
        sys.setswitchinterval(before)
    assert model.config._attn_implementation == "sdpa"
    assert not [m for m in model.modules() if "forward" in m.__dict__]
    assert not model._forward_pre_hooks


def test_a_registry_is_filled_once_whoever_asks(tmp_path, monkeypatch):
    """A thread that asks while another one fills it waits, and does not hear that a name is unknown."""
    package = tmp_path / "pond_shapes"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import threading\nfrom millpond.registry import Registry\n"
        "shapes = Registry('shape', 'pond_shapes')\nbegun = threading.Event()\n"
    )
    (package / "round.py").write_text(
        "import time\nfrom pond_shapes import begun, shapes\nbegun.set()\ntime.sleep(0.2)\n"
        "@shapes.register('round')\ndef build() -> str:\n    '''Round.'''\n    return 'o'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    shapes = importlib.import_module("pond_shapes")
    assert isinstance(shapes.shapes, Registry)

    def late():
        assert shapes.begun.wait(WAIT)
        return shapes.shapes.get("round")()

    assert together(lambda: shapes.shapes.get("round")(), late) == ["o", "o"]
