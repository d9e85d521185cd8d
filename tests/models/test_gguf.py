"""Models from GGUF files: the same weights and tokens as transformers makes of them, converted once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from tests.helpers.gguf.files import ARCHITECTURES, KINDS, TEMPLATE, VOCAB, write_gguf
from tests.helpers.models import NO_REAL, REAL, needs_real_model
from transformers import AutoModelForCausalLM

import millpond as mp
from millpond.errors import OptionError
from millpond.models.downloads import downloaded_gguf
from millpond.models.gguf import convert, converted
from millpond.models.gguf.convert import find_gguf
from millpond.models.load import find_tokenizer, load_model, load_tokenizer, resolve

WIKITEXT = Path(__file__).parents[3] / "shared" / "data" / "text" / "wikitext2_test.txt"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    if request.node.get_closest_marker("real") is None:
        monkeypatch.setenv("MILLPOND_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_and_tokens_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, architecture, "Q8_0")
    model = load_model(path, "f32")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    ours, theirs = model.state_dict(), stock.state_dict()
    assert type(model) is type(stock)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    ids = torch.randint(VOCAB, (1, 40), generator=torch.Generator().manual_seed(0))
    wanted = stock.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
    with mp.compress(model, "full"):
        assert model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0).tolist() == wanted.tolist()  # type: ignore[operator]


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_of_number(kind: str, tmp_path: Path) -> None:
    """The matrices of the file, which llama.cpp does not reorder, are those of the model."""
    matrices = write_gguf(tmp_path / "tiny.gguf", kind=kind, tokenizer=False)
    layer = load_model(tmp_path / "tiny.gguf", "f32").model.layers[1]  # type: ignore[union-attr, index]
    for name, linear in (("attn_v", layer.self_attn.v_proj), ("ffn_down", layer.mlp.down_proj)):  # type: ignore[union-attr]
        found = linear.weight
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, torch.from_numpy(matrices[f"blk.1.{name}.weight"]))
        assert found.abs().max() > 0


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16), ("Q4_0", torch.bfloat16)],
)
def test_the_dtype_is_the_files_own(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", kind=kind)
    assert load_model(tmp_path / "tiny.gguf").dtype is dtype


def test_tokenizer_and_chat_template_come_with_it(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    tokenizer = load_tokenizer(tmp_path / "tiny.gguf")
    text = "then the rain, \u00fcber them\n"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert len(tokenizer.encode(" the", add_special_tokens=False)) == 1
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.eos_token == "<|end|>"


def test_a_file_without_a_tokenizer_is_for_ids(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tokenizer=False)
    llm = mp.LLM(str(tmp_path / "tiny.gguf"), kv_memory="8MiB")
    (out,) = llm.generate([[1, 2, 3]], mp.SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    assert len(out.completions[0].token_ids) == 3
    assert find_tokenizer(tmp_path / "tiny.gguf") is None


def test_it_is_converted_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each dtype; the tokenizer takes whichever is there. Another file of the same name is another model."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, kind="Q8_0")
    first = resolve(path, "f32")
    assert resolve(path, None) == first
    assert Path(first).parent.parent == cache / "gguf"
    with monkeypatch.context() as patch:
        patch.setattr(convert, "_load", None)
        assert resolve(path, "f32") == first
        load_tokenizer(path)
        with pytest.raises(TypeError):
            resolve(path)
    assert [p.name for p in Path(first).parent.iterdir()] == ["f32"]  # nothing of the failed conversion is left
    write_gguf(path, kind="Q8_0", seed=1)
    assert resolve(path, "f32") != first


def test_a_file_that_nobody_wrote_to_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converted, "_TICK", -1)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, kind="Q8_0")
    folder, other = resolve(path), resolve(path, "f32")
    before = path.stat()
    monkeypatch.setattr(convert, "read_header", None)
    monkeypatch.setattr(convert, "_digest", None)
    assert resolve(path) == resolve(path, "bf16") == resolve(path, None) == folder
    assert resolve(path, "f32") == other
    with path.open("r+b") as file:  # another number, in as many bytes, with the old time put back
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(TypeError):
        resolve(path)


def test_a_file_that_was_written_just_now_is_read_again(tmp_path: Path) -> None:
    """Its time may be that of a change which comes after it was read."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, kind="Q8_0")
    folder = Path(resolve(path))
    path.touch()
    converted.note_source(folder, path, converted.FileIdentity.of(path), "bf16")
    assert converted.own_dtype(folder, path) is None


def test_two_at_once_make_one(tmp_path: Path) -> None:
    path, found = tmp_path / "tiny.gguf", []
    write_gguf(path)
    threads = [threading.Thread(target=lambda: found.append(convert.converted_folder(path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert len(set(found)) == 1
    assert [p.name for p in found[0].parent.iterdir()] == ["f32"]
    load_model(path)


CHILD = """
import sys, time
from pathlib import Path
from millpond.models.downloads import downloaded_gguf
from millpond.models.gguf import convert, converted
from millpond.models.gguf.convert import find_gguf

def wait(path, dtype, config):
    print("converting", flush=True)
    time.sleep(600)

convert._load = wait
convert.converted_folder(Path(sys.argv[1]))
"""


def _converting(path: Path) -> subprocess.Popen[str]:
    """Another process in the middle of a conversion."""
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "converting\n"
    return child


@pytest.mark.slow
def test_what_a_killed_process_left_is_removed_and_what_a_live_one_makes_is_not(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    killed, alive = _converting(path), _converting(path)
    try:
        left = sorted(cache.glob("gguf/*/.converting-*"))
        assert len([entry for entry in left if entry.is_dir()]) == 2
        killed.kill()
        killed.wait()
        folder = convert.converted_folder(path)
        (under_way,) = set(cache.glob("gguf/*/.converting-*")) & {entry for entry in left if entry.is_dir()}
        assert under_way.with_name(under_way.name + ".lock").exists()
    finally:
        for child in (killed, alive):
            child.kill()
            child.communicate()
    convert.converted_folder(path, "bf16")
    assert sorted(p.name for p in folder.parent.iterdir()) == ["bf16", "f32"]


def test_it_can_be_saved_and_loaded(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", kind="Q4_1")
    model = load_model(tmp_path / "tiny.gguf")
    model.save_pretrained(tmp_path / "saved")
    again = load_model(tmp_path / "saved").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())


def test_a_folder_with_one_file_is_that_file(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    assert resolve(folder) == str(folder)
    write_gguf(folder / "a.gguf")
    assert resolve(folder) == resolve(folder / "a.gguf")
    (folder / "b.GGUF").write_bytes((folder / "a.gguf").read_bytes())
    with pytest.raises(OptionError, match=r"holds 2 GGUF files \(a.gguf, b.GGUF\); name one of them, as .*a.gguf"):
        resolve(folder)
    (folder / "config.json").write_text("{}")
    assert resolve(folder) == str(folder)


def test_no_room_is_said_before_anything_is_written(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 10**6})())
    with pytest.raises(OptionError, match=r"converting tiny.gguf to f32 needs .* MB free; make room, or set MILL"):
        load_model(tmp_path / "tiny.gguf")
    assert not [*cache.rglob("*.safetensors")]


@needs_real_model
@pytest.mark.slow
def test_a_real_model_says_what_transformers_says() -> None:
    """Greedy text of 200 tokens in float32, and `full` to 1e-5."""
    assert REAL is not None
    model, tokenizer = load_model(REAL, "f32"), load_tokenizer(REAL)
    ids = tokenizer("The history of the printing press", return_tensors="pt")["input_ids"]
    stock = model.generate(ids, max_new_tokens=200, do_sample=False)  # type: ignore[operator]
    with torch.no_grad():
        wanted = model(stock).logits
    with mp.compress(model, "full") as cache, torch.no_grad():
        assert torch.equal(model.generate(ids, max_new_tokens=200, do_sample=False), stock)  # type: ignore[operator]
        cache.reset()
        found = model(stock, cache=cache).logits
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@needs_real_model
@pytest.mark.slow
def test_the_file_says_what_transformers_reads_of_it(tmp_path: Path) -> None:
    """Weights and 50 greedy tokens, against transformers' own reading of the same GGUF file."""
    file = downloaded_gguf("smollm2-135m") if REAL == "smollm2-135m" else find_gguf(Path(str(REAL)))
    if file is None:
        pytest.skip(f"{REAL} is no GGUF file")
    model, tokenizer = load_model(file, "f32"), load_tokenizer(file)
    stock = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    ours, theirs = model.state_dict(), stock.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    ids = tokenizer("The history of the printing press", return_tensors="pt")["input_ids"]
    wanted = stock.generate(ids, max_new_tokens=50, do_sample=False)
    with mp.compress(model, "full"):
        assert torch.equal(model.generate(ids, max_new_tokens=50, do_sample=False), wanted)  # type: ignore[operator]


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.skipif(REAL != "smollm2-135m", reason=NO_REAL)
@pytest.mark.skipif(not WIKITEXT.is_file(), reason=f"{WIKITEXT.name} is not in ../shared/data/text")
def test_perplexity_of_a_real_text() -> None:
    """WikiText-2, the first 2,048 tokens, in one pass: 13.4."""
    model, tokenizer = load_model("smollm2-135m", "f32"), load_tokenizer("smollm2-135m")
    text = WIKITEXT.read_text(encoding="utf-8")[:20_000]
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :2048]
    assert ids.shape[1] == 2048
    with mp.compress(model, "full") as cache, torch.no_grad():
        logits = model(ids, cache=cache).logits[0, :-1]
    assert 13.3 < torch.nn.functional.cross_entropy(logits, ids[0, 1:]).exp() < 13.5
