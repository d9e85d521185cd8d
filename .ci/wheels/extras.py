"""What each extra is for, as something that must work with it alone and must name it without."""

from __future__ import annotations

from dataclasses import dataclass

#: A question of the bundled model, whose answer is "kettle".
ASK = "anna kettle " + "quiet rain " * 40 + "<ask> anna <is>"


@dataclass(frozen=True, slots=True)
class Use:
    """A use of an extra.

    Attributes:
        library: what the extra adds, as Python imports it; where something else has brought it too, as transformers
            does typer, nothing can be refused.
        works: a command line of millpond, or a program in Python. says: what it prints among other things.
        refused: the same, for an environment without the extra; it must name the command that installs it.
        without: the extra that this environment has; "" for none.
        variables: of the environment, for `works`. sources: what it needs that has no wheels: pure Python.
    """

    library: str
    works: str
    says: str
    refused: str
    without: str = ""
    variables: tuple[tuple[str, str], ...] = ()
    sources: tuple[str, ...] = ()


CACHE = """
import millpond as mp
model, tokenizer = mp.load_model("pond-recall"), mp.load_tokenizer("pond-recall")
"""
CONSTRAINED = """
import millpond as mp
params = mp.SamplingParams(max_tokens=8, temperature=0, choice=("kettle", "ladder"))
with mp.LLM("pond-recall") as llm:
    print("answer:", llm.generate("anna", params)[0].completions[0].text.strip() in ("kettle", "ladder"))
"""
GPU = (
    CACHE
    + """
from millpond.kernels import gpu
with mp.compress(model, method="streaming", budget=16, codec="bf16") as cache:
    out = model.generate(**tokenizer("anna kettle quiet rain", return_tensors="pt"), cache=cache, max_new_tokens=2)
print("tokens:", out.shape[1], gpu.__name__)
"""
)
MODELS = """
import millpond as mp
with mp.LLM("pond-text", method="h2o", budget=32) as llm:
    print("words:", len(llm.generate("It was a dark", mp.SamplingParams(max_tokens=8))[0].completions[0].token_ids))
"""
GGUF = """
import sys
from pathlib import Path
sys.path.append("CHECKOUT")  # which has no package millpond: that one is in src
from tests.helpers.gguf.files import write_gguf
import millpond as mp
write_gguf(Path("tiny.gguf"))
print("layers:", len(mp.load_model("tiny.gguf").model.layers))
"""
NO_GGUF = """
import millpond as mp
open("model.gguf", "wb").write(b"GGUF" + (3).to_bytes(4, "little") + bytes(16))
mp.load_model("model.gguf")
"""
PARQUET = """
import datasets
datasets.Dataset.from_list([{"goal": "g", "sol1": "a", "sol2": "b", "label": 0}]).to_parquet("piqa.parquet")
from millpond_lab.evals.data.data_files import read_rows
print("rows:", len(read_rows("piqa.parquet")))
"""
NO_PARQUET = """
from millpond_lab.evals.data.data_files import read_rows
read_rows("piqa.parquet")
"""
LM_EVAL = """
import json, subprocess, sys
from pathlib import Path
rows = [{"text": "anna kettle <ask> anna <is>", "choices": [" kettle", " ladder"], "right": 0}] * 2
Path("rows.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
task = {
    "task": "pond_choice",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(Path("rows.jsonl").absolute())}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{text}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{right}}",
    "metric_list": [{"metric": "acc"}],
}
Path("task.yaml").write_text(json.dumps(task))  # which is YAML too
command = [Path(sys.executable).with_name("millpond"), "lm-eval", "--tasks", "pond_choice", "--include_path", "."]
subprocess.run([*command, "--model_args", "pretrained=pond-recall,method=h2o,budget=50%"], check=True)
"""
SERVER = """
import json, re, subprocess, sys, urllib.request
from pathlib import Path
command = [Path(sys.executable).with_name("millpond"), "serve", "--port", "0", "--model", "pond-recall"]
with subprocess.Popen(
    [*command, "--kv-memory", "16MiB"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
) as server:
    try:
        found = next(filter(None, (re.search(r"http://[\\w.]+:\\d+", line) for line in server.stdout)))[0]
        body = {"model": "pond-recall", "prompt": "ASK", "max_tokens": 2, "temperature": 0}
        request = urllib.request.Request(f"{found}/v1/completions", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        print(json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["text"])
        print("page:", b"<html" in urllib.request.urlopen(f"{found}/", timeout=60).read())
        print("metrics:", b"millpond" in urllib.request.urlopen(f"{found}/metrics", timeout=60).read())
    finally:
        server.terminate()
""".replace("ASK", ASK)
VISION = """
import io
from PIL import Image
from transformers import CLIPImageProcessorPil
from millpond.images.reader import ImageReader
from millpond.models.load import find_image_processor
CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}).save_pretrained("clip")
file = io.BytesIO()
Image.new("RGB", (24, 16)).save(file, "PNG")
print("pixels:", tuple(ImageReader(find_image_processor("clip"), "<image>", 4).read(file.getvalue()).pixels.shape))
"""
NO_VISION = """
from pathlib import Path
from millpond.models.load import find_image_processor
Path("clip").mkdir(exist_ok=True)
Path("clip/preprocessor_config.json").write_text('{"image_processor_type": "CLIPImageProcessorPil"}')
find_image_processor("clip")
"""
OFFLOAD = """
import millpond as mp
from millpond.engine.offload.planner import EXAMPLE
found = mp.plan("pond-recall", memory="64MiB", prompt_tokens=256, new_tokens=64, disk=".", machine=EXAMPLE)
print("kv:", found.kv)
"""
CLUSTER = """
import millpond as mp
import ray
if __name__ == "__main__":
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    rows = ray.data.from_items([{"id": str(i), "text": "ASK"} for i in range(2)])
    params = mp.SamplingParams(max_tokens=2, temperature=0)
    answers = mp.cluster.generate_dataset(rows, "pond-recall", params=params, method="h2o", budget=64)
    print([row["answer"].split()[-1] for row in answers.take_all()])
""".replace("ASK", ASK)
NO_CLUSTER = "import millpond as mp\nmp.cluster.LLM('pond-recall', replicas=2)"

#: By extra, in the order in which they are tried.
USES = {
    "cli": Use(
        library="typer",
        works=f"millpond generate --prompt '{ASK}' --method h2o --budget 50% --max-new-tokens 2",
        says="kettle",
        refused="millpond --help",
    ),
    "plot": Use(
        library="matplotlib",
        works="millpond demo --questions 4 --methods full,keydiff",
        says="kept-positions.png",
        refused="millpond demo",
        without="cli",
    ),
    "constrained": Use(library="xgrammar", works=CONSTRAINED, says="answer: True", refused=CONSTRAINED),
    "offload": Use(library="scipy", works=OFFLOAD, says="kv:", refused=OFFLOAD),
    "vision": Use(library="PIL", works=VISION, says="pixels: (3, 8, 8)", refused=NO_VISION),
    "models": Use(library="millpond_models", works=MODELS, says="words: 8", refused=MODELS),
    "gguf": Use(library="gguf", works=GGUF, says="layers: 2", refused=NO_GGUF),
    "server": Use(library="fastapi", works=SERVER, says="kettle", refused="millpond serve", without="cli"),
    "lab": Use(
        library="millpond_lab",
        works="millpond eval --tasks recall --method h2o --budget 50% --samples 2 --out eval",
        says="h2o",
        refused="millpond eval --tasks recall",
        without="cli",
    ),
    "eval": Use(library="datasets", works=PARQUET, says="rows: 1", refused=NO_PARQUET, without="lab"),
    "lm-eval": Use(
        library="lm_eval",
        works=LM_EVAL,
        says="pond_choice",
        refused="millpond lm-eval",
        without="lab",
        sources=("sqlitedict", "rouge-score", "word2number"),
    ),
    "cluster": Use(library="ray", works=CLUSTER, says="kettle", refused=NO_CLUSTER),
    "gpu": Use(
        library="triton",
        works=GPU,
        says="millpond.kernels.gpu",
        refused="import millpond.kernels.gpu",
        variables=(("TRITON_INTERPRET", "1"), ("MILLPOND_KERNELS", "gpu")),
    ),
}
