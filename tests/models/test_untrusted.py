"""Folders of strangers: a typed error that names the file, in bounded time and memory, and none of their code."""

from __future__ import annotations

import ast
import json
import resource
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tests.helpers.gguf.files import write_gguf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import millpond as mp
from millpond.errors import DataError, OptionError
from millpond.models.load import find_tokenizer, load_model, load_tokenizer, resolve
from millpond.models.untrusted import render
from millpond.models.untrusted.config import check_config, check_templates
from millpond.models.untrusted.render import write_chat
from millpond.models.weights.skeleton import Skeleton
from server.test_chat import chat, templated
from server.test_tool_templates import TEMPLATES

PACKAGE = Path(mp.__file__).parent
#: A model of which each layer has a mask of all its positions.
MASKS = {
    "model_type": "gpt_neo",
    "max_position_embeddings": 2**17,
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 2,
    "attention_types": [[["global", "local"], 1]],
    "vocab_size": 714,
}
#: A model of which the file of weights holds nothing.
WORDS = {"model_type": "gpt2", "vocab_size": 2**20, "n_embd": 1_024, "n_layer": 1, "n_head": 2}
#: Processor seconds, and bytes of memory beyond what was taken before, of one refusal.
SECONDS, MEMORY = 3.0, 256 << 20
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set n = namespace(x='xxxx') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"
BRANCHES = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
NESTED = '{"a":' * 100_000 + "1" + "}" * 100_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(resolve("pond-recall"), tmp_path / "model")
    return tmp_path / "model"


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def config(**values: Any) -> Callable[[Path], None]:
    return lambda folder: change(folder / "config.json", **values)


def tokenizer_config(**values: Any) -> Callable[[Path], None]:
    return lambda folder: change(folder / "tokenizer_config.json", **values)


def text(name: str, content: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)

    return write


def link(name: str, to: str | None = None) -> Callable[[Path], None]:
    """A file that lies elsewhere, or a link to `to`."""

    def make(folder: Path) -> None:
        if to is None:
            shutil.move(folder / name, folder.parent / name)
        (folder / name).symlink_to(folder.parent / name if to is None else to)

    return make


def shards(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        shutil.move(folder / "model.safetensors", folder.parent / "model.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))

    return make


#: What is wrong -> how it is made, and the file that the error names.
HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a billion layers": (config(num_hidden_layers=10**9), "config.json"),
    "a billion layers inside": (config(text_config={"n_layers": 10**9}), "config.json"),
    "a billion labels": (config(num_labels=10**9), "config.json"),
    "fewer layers than none": (config(num_hidden_layers=-5), "config.json"),
    "a width of 2**60": (config(hidden_size=2**60), "config.json"),
    "positions of 2**60": (config(max_position_embeddings=2**60), "config.json"),
    "no heads": (config(num_attention_heads=0), "config.json"),
    "layers in words": (config(num_hidden_layers="many"), "config.json"),
    "half a million kinds of layers": (config(layer_types=["full_attention"] * 500_000), "config.json"),
    "brackets": (text("config.json", "[" * 100_000 + "]" * 100_000), "config.json"),
    "some brackets": (text("config.json", '{"a":' * 300 + "1" + "}" * 300), "config.json"),
    "no table": (text("config.json", "[]"), "config.json"),
    "no JSON": (text("config.json", "{"), "config.json"),
    "a long configuration": (text("config.json", '{"a":"' + "x" * (17 << 20) + '"}'), "config.json"),
    "brackets of the tokenizer's settings": (text("tokenizer_config.json", NESTED), "tokenizer_config.json"),
    "a configuration elsewhere": (link("config.json"), "config.json"),
    "weights elsewhere": (link("model.safetensors"), "model.safetensors"),
    "a link to nothing": (link("more.json", "/nowhere/at/all"), "more.json"),
    "a link to itself": (link("more.json", "more.json"), "more.json"),
    "a template elsewhere": (link("chat_template.jinja"), "chat_template.jinja"),
    "shards above": (shards("../model.safetensors"), "model.safetensors.index.json"),
    "shards at the root": (shards("/etc/passwd"), "model.safetensors.index.json"),
    "a kernel of the hub": (config(attn_implementation="someone/kernel"), "config.json"),
}
#: The same, of what only one of the two loads.
HOSTILE_MODELS: dict[str, tuple[Callable[[Path], None], str]] = {
    "more words than weights": (config(vocab_size=2**31 - 1), "config.json describes"),
    "words without weights": (text("config.json", json.dumps(WORDS)), "config.json describes"),
    "masks of 2**34": (text("config.json", json.dumps(MASKS)), "config.json describes buffers"),
    "settings of other kinds": (text("generation_config.json", '{"max_new_tokens": "x"}'), "generation_config.json"),
    "weights cut off": (lambda folder: _cut(folder / "model.safetensors"), "weights"),
    "a header of 2**60": (lambda folder: _head(folder / "model.safetensors"), "weights"),
}
HOSTILE_TOKENIZERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "brackets of the tokenizer": (text("tokenizer.json", NESTED), "tokenizer.json"),
    "an empty tokenizer": (text("tokenizer.json", "{}"), "tokenizer.json"),
    "a model as tokenizer": (tokenizer_config(tokenizer_class="LlamaForCausalLM"), "model"),
    "a number as tokenizer": (tokenizer_config(tokenizer_class=5), "tokenizer_config.json"),
    "a table as tokenizer": (tokenizer_config(tokenizer_class={"a": 1}), "tokenizer_config.json"),
    "an endless template": (text("chat_template.jinja", LOOP), "chat_template.jinja"),
    "another endless template": (
        text("additional_chat_templates/tool_use.jinja", BRANCHES),
        "additional_chat_templates/tool_use.jinja",
    ),
    "a template that doubles": (text("chat_template.jinja", DOUBLING), "chat_template.jinja"),
    "a template of 2**37": (text("chat_template.jinja", "{{ 'x' * 2**37 }}"), "chat_template.jinja"),
    "an endless answer": (
        text("chat_template.jinja", "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}"),
        "chat_template.jinja",
    ),
    "a deep template": (
        text("chat_template.jinja", "{{" + "(" * 5_000 + "1" + ")" * 5_000 + "}}"),
        "chat_template.jinja",
    ),
    "no template": (text("chat_template.jinja", "{% for %}"), "chat_template.jinja"),
    "a long template": (text("chat_template.jinja", "x" * (2 << 20)), "chat_template.jinja"),
}


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:10_000])


def _head(file: Path) -> None:
    file.write_bytes((2**60).to_bytes(8, "little") + b"{}")


def refused(load: Callable[[Path], Any], folder: Path, names: str) -> None:
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises((DataError, OptionError)) as caught:
        load(folder)
    assert time.process_time() - begin < SECONDS
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MEMORY
    assert names in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("load", [load_model, load_tokenizer, Skeleton.of], ids=["model", "tokenizer", "layers"])
def test_hostile_folders_are_refused(load: Callable[[Path], Any], name: str, folder: Path) -> None:
    make, file = HOSTILE[name]
    make(folder)
    refused(load, folder, "" if load == Skeleton.of else file)


@pytest.mark.parametrize("name", HOSTILE_MODELS)
def test_hostile_models_are_refused(name: str, folder: Path) -> None:
    make, file = HOSTILE_MODELS[name]
    make(folder)
    refused(load_model, folder, file)


@pytest.mark.parametrize("name", HOSTILE_TOKENIZERS)
def test_hostile_tokenizers_are_refused(name: str, folder: Path) -> None:
    make, file = HOSTILE_TOKENIZERS[name]
    make(folder)
    refused(load_tokenizer, folder, file)


def test_they_are_refused_before_weights_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any, **__: Any) -> Any:
        raise AssertionError("weights were read")

    (folder / "chat_template.jinja").write_text(LOOP)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", read)
    for options in ({}, {"memory": "64MiB"}):
        with pytest.raises(DataError, match=r"chat_template\.jinja"):
            mp.LLM(str(folder), **options)  # type: ignore[arg-type]


def test_a_tokenizer_of_another_model_names_the_token(folder: Path) -> None:
    change(folder / "tokenizer_config.json", tokenizer_class="BertTokenizer")
    with mp.LLM(str(folder), method="full") as llm, pytest.raises(OptionError, match="is not one of the model's 714"):
        llm.generate("the quiet rain")


@pytest.mark.parametrize("name", ["block_count", "expert_count", "embedding_length"])
def test_numbers_of_gguf_files_are_bounded_too(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLPOND_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf", **{name: 2**32 - 1})
    begin = time.process_time()
    with pytest.raises(DataError, match=r"tiny\.gguf"):
        load_model(tmp_path / "tiny.gguf")
    assert time.process_time() - begin < SECONDS


# ---------------------------------------------------------------------- code in the folder


def own_classes(folder: Path, mark: Path) -> None:
    """Code for configuration and model in a folder, as an honest author writes it; it also leaves a mark."""
    code = f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n"
    (folder / "configuration_own.py").write_text(
        code + "from transformers import LlamaConfig\nclass OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
    )
    (folder / "modeling_own.py").write_text(
        "from transformers import LlamaForCausalLM\nfrom .configuration_own import OwnConfig\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    auto = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    change(folder / "config.json", model_type="own", architectures=["OwnForCausalLM"], auto_map=auto)


def own_tokenizer(folder: Path, mark: Path) -> None:
    code = f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n"
    (folder / "tokenization_own.py").write_text(
        code + "from transformers import PreTrainedTokenizerFast\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    auto = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    change(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=auto)


@pytest.fixture(scope="session")
def modules(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where transformers copies the code that it runs; it is imported from the first such folder of a process."""
    return str(tmp_path_factory.mktemp("modules"))


@pytest.fixture
def named(folder: Path, modules: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a name of its own, as the code in it is imported by that."""
    for module in (transformers.dynamic_module_utils, transformers.utils.hub, transformers.utils):
        if hasattr(module, "HF_MODULES_CACHE"):
            monkeypatch.setattr(module, "HF_MODULES_CACHE", modules)
    return folder.rename(folder.parent / f"model_{folder.parent.name}")


def yes(*_: Any) -> str:
    raise AssertionError("somebody was asked whether to run it")


@pytest.mark.parametrize(
    ("make", "load"),
    [
        (own_classes, load_model),
        (own_tokenizer, load_tokenizer),
        (own_tokenizer, find_tokenizer),
        (own_classes, lambda folder, **trust: mp.LLM(str(folder), method="full", **trust).close()),
        (own_tokenizer, lambda folder, **trust: mp.LLM(str(folder), method="full", **trust).close()),
    ],
)
def test_code_of_a_folder_runs_only_where_the_user_says_so(
    make: Callable[[Path, Path], None],
    load: Callable[..., Any],
    named: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("builtins.input", yes)
    mark = tmp_path / "it-ran"
    make(named, mark)
    with pytest.raises(OptionError, match="--trust-remote-code"):
        load(named)
    assert not mark.exists()
    load(named, trust_remote_code=True)
    assert mark.exists()


@pytest.mark.parametrize("name", ["AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"])
def test_code_that_is_not_needed_is_not_run(name: str, folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "it-ran"
    (folder / "own.py").write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n")
    change(folder / "config.json", auto_map={name: "own.Own"})
    (folder / "custom_generate").mkdir()
    shutil.copy(folder / "own.py", folder / "custom_generate" / "generate.py")
    load_model(folder)
    load_tokenizer(folder)
    assert not mark.exists()


def test_layers_that_are_read_one_by_one_run_no_code(folder: Path) -> None:
    for options in ({"memory": "64MiB"}, {"weights": "int8"}):
        with pytest.raises(OptionError, match="no code of the folder"):
            mp.LLM(str(folder), trust_remote_code=True, **options)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="is for a model that is loaded here"):
        mp.LLM(load_model("pond-recall"), trust_remote_code=True)


def test_every_load_by_transformers_says_whose_code_may_run() -> None:
    """`None`, its default, asks on the terminal."""
    silent = []
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr not in ("from_pretrained", "from_config"):
                continue
            if ast.unparse(node.func.value) == "GenerationConfig":  # has no code
                continue
            if "trust_remote_code" not in [keyword.arg for keyword in node.keywords]:
                silent.append(f"{file.relative_to(PACKAGE)}:{node.lineno}")
    assert not silent


# ---------------------------------------------------------------------- what is not hostile


def test_the_hubs_cache_may_link_to_its_blobs(folder: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(folder.iterdir()):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert load_model(snapshot).num_parameters() > 0
    assert len(load_tokenizer(snapshot)) == 714


@pytest.mark.parametrize("step", [16, pytest.param(1, marks=pytest.mark.slow)])
def test_no_configuration_of_transformers_is_refused(step: int) -> None:
    checked = 0
    for kind in sorted(CONFIG_MAPPING)[::step]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = CONFIG_MAPPING[kind]().to_dict()
        except Exception:  # some cannot be made without arguments, or packages
            continue
        check_config(made, kind)
        checked += 1
    assert checked > 300 / step


def test_known_templates_are_not_refused() -> None:
    class Holder:
        chat_template = TEMPLATES

    check_templates(Holder(), "here")


# ---------------------------------------------------------------------- a template that waits for its chat


@pytest.mark.parametrize("template", [LOOP, BRANCHES], ids=["loops", "branches"])
def test_a_template_that_does_not_end_is_ended(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is tried and ends, but not with every chat."""
    tokenizer: Any = load_tokenizer("pond-recall")
    tokenizer.chat_template = f"{{% if messages[0].content == 'now' %}}{template}{{% endif %}}yes"
    monkeypatch.setattr(render, "MAX_SECONDS", 0.3)
    begin = time.thread_time()
    for _ in range(2):
        with pytest.raises(OptionError, match=r"has not ended after 0\.3 s"):
            write_chat(tokenizer, [{"role": "user", "content": "now"}])
    assert time.thread_time() - begin < 3
    assert write_chat(tokenizer, [{"role": "user", "content": "then"}]) == "yes"
    assert not [one for one in threading.enumerate() if one.name == "template-watch" and one.is_alive()][2:]


def test_a_server_goes_on_behind_such_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "MAX_SECONDS", 0.3)
    llm = templated()
    endless = f"{{% if messages[0].content == 'w7' %}}{LOOP}{{% endif %}}"
    llm.tokenizer.chat_template = endless + "{{ messages[0].content }}"
    hostile = chat({"messages": [{"role": "user", "content": "w7"}]}, llm)
    assert hostile.status_code == 400
    assert hostile.json()["error"]["code"] == "template_error"
    assert chat({}, llm).status_code == 200
