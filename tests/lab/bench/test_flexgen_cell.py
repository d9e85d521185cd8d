"""FlexGen's cells: the weights that it reads, what is refused, and its tokens where its code is at hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from millpond.errors import OptionError
from millpond_lab.bench.offload import cell, flexgen, shapes
from millpond_lab.bench.offload.settings import CELLS, OffloadSettings
from millpond_lab.bench.offload.table import name_of

PACKAGE = Path(__file__).parents[3] / "build" / "flexgen"
TINY = {
    "family": "opt",
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 96,
}
RUNS = """
import json, sys
from pathlib import Path
from millpond_lab.bench.offload import flexgen, shapes
from millpond_lab.bench.offload.settings import OffloadSettings

class Held:
    def __init__(self, folder, memory, enforce): pass
    def end(self): return {}

def noting(name, load=flexgen.import_module):
    module = load(name)
    if name.endswith("flex_opt"):
        generate = module.OptLM.generate
        module.OptLM.generate = lambda *given, **more: found.append(generate(*given, **more)) or found[-1]
    return module

found = []
flexgen.Cap, flexgen.import_module = Held, noting
folder, package, shape = sys.argv[1:4]
shapes.SHAPES["tiny"] = json.loads(shape)
settings = OffloadSettings(shape="tiny", prompt=20, new=8, threads=1, steps=100)
row = flexgen.run_flexgen(Path(folder), 2, 2, settings, Path(package))
print(json.dumps([row, found[0].tolist()]))
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)
    shapes.make_model(tmp_path, "tiny")
    return tmp_path


def test_its_weights_are_the_models(model: Path) -> None:
    flexgen.write_weights(model, "tiny")
    kept = AutoModelForCausalLM.from_pretrained(model).model.state_dict()
    files = list((model / "flexgen" / "random-np").iterdir())
    assert len(files) == len(kept)
    for file in files:
        name = file.name.replace("decoder.layer_norm", "decoder.final_layer_norm")
        assert np.array_equal(np.load(file), kept[name].half().numpy()), name


@pytest.mark.skipif(not PACKAGE.is_dir(), reason="FlexGen's code is not in build: benchmarks/engines/flexgen_env.sh")
def test_its_tokens_are_the_models(model: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", RUNS, str(model), str(PACKAGE), json.dumps(TINY)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    row, tokens = json.loads(done.stdout.splitlines()[-1])
    assert (row["requests"], row["new_tokens"], row["decode_steps"], row["projected"]) == (4, 32, 7, False)
    plain = AutoModelForCausalLM.from_pretrained(model)
    prompts = torch.tensor(shapes.prompts_of(4, 20, "tiny"))
    wanted = plain.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=8, do_sample=False)
    assert tokens == wanted.tolist()


def test_another_model_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="holds no package flexllmgen"):
        flexgen.check(tmp_path, "opt-1.0B")
    (tmp_path / "flexllmgen").mkdir()
    with pytest.raises(OptionError, match=r"runs only OPT, and 1\.04B is not an OPT"):
        flexgen.check(tmp_path, "1.04B")
    flexgen.check(tmp_path, "opt-1.0B")


def test_bytes_of_keys_and_values_and_what_cannot_hold_them(model: Path, tmp_path: Path) -> None:
    assert shapes.kv_bytes("tiny", 10) == 2 * 2 * 10 * 3 * 64
    assert shapes.kv_bytes("1.04B", 1) == 2 * 2 * 22 * 4 * 64
    settings = OffloadSettings(shape="tiny", memory=4 * shapes.kv_bytes("tiny", 25) - 1, prompt=20, new=5)
    with pytest.raises(MemoryError, match="76,800 bytes of keys and values at the end, and 76,799 allowed"):
        cell.run_accelerate(model, 4, settings, tmp_path)


def test_cells_have_names() -> None:
    named = [name_of(name) for name in CELLS if name.startswith("flexgen")]
    assert "FlexGen, weights and KV in files, 8 batches of 2" in named
