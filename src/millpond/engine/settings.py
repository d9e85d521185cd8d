"""The settings of an engine, and of the model that it loads: what each means, without what they need to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, get_args

from millpond.budget import DEFAULT, Budget, parse_bytes
from millpond.cache.pages.page_slots import DEFAULT_SLOTS
from millpond.cache.paging.choose import LIVE
from millpond.runner.runner_choice import Runner
from millpond.setting import check_settings, setting

if TYPE_CHECKING:
    import torch

    from millpond.cache.chunks.store import ChunkStore
    from millpond.codec import CodecSpec
    from millpond.engine.offload.machine import MachineConstants
    from millpond.engine.offload.plan import Plan
    from millpond.hf.calibration.load import CalibrationSource
    from millpond.hf.fit import FitSource
    from millpond.hf.text_storage import TransformSource
    from millpond.models.weights.streamed import Verify

#: What becomes of a text that is longer than the model's context.
Overflow = Literal["refuse", "rolling"]
#: "refuse" a request of whose prompt something would be evicted, or "evict" as its method does.
OnPressure = Literal["refuse", "evict"]
#: What a preempted request's cache becomes: "swap" moves its pages as they are, "codes" codes them.
Preemption = Literal["swap", "codes"]


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The fields of `EngineConfig`, which checks what they say together.

    Raises:
        OptionError, BudgetError: a value out of its range.
    """

    method: str | None = setting(
        None,
        "Method that chooses the kept entries: see 'millpond methods'.",
        default_text="every entry, in 8 bits (`preset` light); with a budget or an option, h2o",
        more="Of requests that name none, as options, budget and codec are; see `compress`.",
    )
    options: Mapping[str, Any] = setting({}, "Options of the method.", more="Files that they name are read here.")
    budget: Budget | str | int | float | None = setting(
        None,
        "'20%' of the prompt, 512 tokens per KV head, '64MiB' in all, or 'auto' with `max_kl`.",
        default_text=f"{DEFAULT}; full takes none",
    )
    codec: CodecSpec | None = setting(
        None,
        "Number format of the entries, see 'millpond codecs'; \"0-1=bf16;*=int4\" by layer, "
        '"bf16:20%;int8:20%;int4" by age.',
    )
    calibration: CalibrationSource | TransformSource = setting(
        None,
        "A file of 'millpond calibrate', for the codecs that need one.",
        more="With `storage_codec` it is the model's transform file.",
    )
    storage_codec: str | None = setting(
        None,
        "Format of stored and moving caches, in bits a number, as transform:1.5; `calibration` is its file.",
        more="Blocks of the prefix cache that nobody uses are coded, in memory and on its disk. Prompts are kept then "
        'as with "lru" where `prefix_cache` is "live". With `deterministic` the prefix cache has no codes. '
        "Stored turns (`cache_dir`) and requests that move to other engines are coded too.",
        metavar="CODEC",
        default_text="nothing is coded",
    )
    storage_delay_s: float = setting(
        2.0,
        "With `storage_codec`: seconds from the last use of a block of the prefix cache until it is coded.",
        at_least=0,
        finite=True,
    )
    max_kl: float | None = setting(
        None,
        "With `budget` auto: how far predictions may differ from the full cache's, in nats.",
        more="Of requests that name none; see `compress`.",
    )
    fit: FitSource = setting(
        None, "With `budget` auto: a file of 'millpond fit'.", default_text="where that command writes it"
    )
    kv_memory: str | int | None = setting(
        None,
        "Limit of the memory for the caches of all requests ('2GiB').",
        more="All page pools together, in bytes.",
        parse=parse_bytes,
        default_text="no limit; on a GPU what it has free at the start, but for the buffers of a step",
    )
    max_step_tokens: int = setting(
        512, "Tokens of one step: with more, prompts are read faster; with fewer, other requests wait less.", at_least=1
    )
    max_running: int = setting(256, "Sequences that decode at a time.", at_least=1)
    overcommit: float = setting(
        1.0,
        "Multiple of `kv_memory` that may be reserved.",
        more="Above 1, requests that use their whole reservation cause preemptions.",
        at_least=1,
    )
    spread_ages: bool = setting(
        False,
        "Reserve for each request what it holds at its age, not what it holds at its end.",
        more="Requests begin spread evenly over the length of an answer while many wait. More run together where "
        'caches grow with the answer; the schedule "diagonal" of a plan sets it.',
    )
    prefix_cache: bool | str = setting(
        LIVE,
        "live: requests in flight share the beginnings of their prompts; or the eviction rule of prompts that are "
        "kept for later ones while there is memory: lru, craft or learned, or lfu, marker, mark0 or mark_predict "
        "of millpond-lab.",
        more='True is "lru", and False shares nothing; see `list_paging_rules`.',
        metavar="RULE",
    )
    pager: str | PathLike[str] | None = setting(
        None, "A file of 'millpond train pager' for a rule that predicts.", default_text="ours"
    )
    prefix_disk: str | int | None = setting(
        None,
        "Disk for kept prompts that leave the memory ('20GiB').",
        more="They come back when a prompt begins with them.",
        parse=parse_bytes,
        default_text="they are evicted",
    )
    prefix_folder: str | PathLike[str] | None = setting(
        None,
        "Folder of `prefix_disk`.",
        more="They lie there in a file without a name.",
        default_text="the system's folder for temporary files",
    )
    swap_to: str | PathLike[str] | None = setting(
        None, "Folder for the caches of preempted requests.", default_text="the host's memory"
    )
    preemption: Preemption = setting(
        "swap",
        "How the caches of preempted requests are stored: swap moves their pages as they are; codes writes them "
        "in `storage_codec`, in a sixth of the memory or less, and answers may differ.",
        choices=get_args(Preemption),
    )
    page_slots: int = setting(DEFAULT_SLOTS, "Entries per page, a power of two.", at_least=1)
    runner: Runner = setting(
        "auto",
        "Forward pass: lean (Millpond's layers), modules (transformers'), or auto.",
        more='"auto" is "lean" where both give the same.',
        choices=get_args(Runner),
    )
    native_layers: bool = setting(True, "Run the model's layers in our own code where it can, see `compress`.")
    weights: str | None = setting(
        None,
        "Pack the model's matrices: int8 or int4 (models that run natively, on a CPU).",
        more="Those of its layers and its head, when the engine is made. The modules of the model are emptied then, "
        "so `LLM` takes this only for a model that it loads.",
        default_text="no",
    )
    chunk_store: ChunkStore | None = setting(
        None,
        "Folder for keys and values of the chunks in prompts.",
        more="A `ChunkStore`; see `Prompt`.",
        default_text="no chunks",
    )
    deterministic: bool = setting(
        False,
        "The same bits whatever else runs with a request; prompts are slower.",
        more="On one CPU, of answers and log probabilities: however steps are filled, whether a beginning is shared "
        "or a cache swapped out, and whatever the threads. Needs a model that runs without its modules. Prompts are "
        "cut at multiples of 256 tokens, of which `max_step_tokens` holds one at least, and share beginnings in such "
        "units.",
    )
    overflow: Overflow = setting(
        "refuse",
        "Texts longer than the model's context: refuse them, or rolling: kept entries move to the beginning of "
        "the context, and the text goes on.",
        choices=get_args(Overflow),
    )
    on_pressure: OnPressure = setting(
        "evict",
        "If a part of a prompt would be evicted: refuse the request before it is read, or evict, as the method "
        "does. Requests may choose otherwise.",
        choices=get_args(OnPressure),
    )
    cache_dir: str | PathLike[str] | None = setting(
        None,
        "Folder for the caches of finished turns: requests that continue a turn start from its cache, even after "
        "a restart.",
        more="Made where it does not exist.",
        default_text="none",
    )
    cache_disk: str | int | None = setting(
        None,
        "Files in `cache_dir`, at most.",
        more="Those that were unused longest go first.",
        parse=parse_bytes,
        default_text="20GiB",
    )
    trust_remote_code: bool = setting(
        False,
        "Run code that comes in the model's folder.",
        more="For configuration, tokenizer and model.",
        default_text="such a model is refused",
    )
    max_model_len: int | None = setting(
        None, "Tokens of a prompt and its answer, at most.", at_least=1, default_text="the model's context"
    )
    preset: str | None = setting(
        None,
        "light, balanced or tiny: method, budget and codec in one word.",
        more="In place of the three, see `millpond.preset`.",
    )
    budget_floor: int = setting(
        0, "Least tokens that a `budget` in percent keeps of each prompt; 0: the share alone.", at_least=0
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """The fields of `LoadOptions`, which checks what they say together.

    Raises:
        OptionError: a value out of its range.
    """

    tokenizer: Any = setting(
        None,
        "The model's tokenizer.",
        more="Without one, prompts are token ids, answers have no text, and what needs texts is refused.",
        default_text="loaded with the model",
    )
    image_processor: Any = setting(
        None,
        "The image processor of a model that takes images.",
        more="Without one, images are refused.",
        default_text="loaded with the model",
    )
    dtype: str | torch.dtype | None = setting(
        None,
        "auto, f32, bf16 or f16; float32, bfloat16 and float16 are the same.",
        more="Of a model that is given by name; also one of torch's dtypes.",
        default_text="as it was saved",
    )
    threads: int | None = setting(None, "CPU threads of torch.", at_least=1, default_text="torch's own choice")
    memory: str | int | None = setting(
        None,
        "Limit of the host's memory for weights, caches and buffers together ('512MiB'); layers that do not fit are "
        "read from the model's folder in every step.",
        default_text="no limit",
    )
    disk: str | PathLike[str] | None = setting(
        None,
        "Folder for packed `weights` and other files of a model that runs with `memory`.",
        more="Blocks of `prefix_disk` lie there too, and keys and values that a plan puts on the disk, which else lie "
        "in the model's folder. It goes with `memory` or `plan`.",
        default_text="none",
    )
    plan: Plan | str | PathLike[str] | None = setting(
        None,
        "Which layers stay in memory, and how many sequences run together: a plan, or a file of 'millpond plan'.",
        default_text='"auto", the fastest that fits in `memory`',
    )
    prompt_tokens: int | None = setting(
        None, "Tokens of the prompts that a plan is made for.", default_text="512, or fewer where no such sequence fits"
    )
    new_tokens: int | None = setting(
        None, "Tokens of the answers that a plan is made for.", default_text="128, or fewer where no such sequence fits"
    )
    machine: MachineConstants | None = setting(
        None, "Constants of this machine for a plan.", default_text="measured once, in about 30 s, and kept"
    )
    verify: Verify = setting("first", 'Compare packed weights with their checksums at the "first" read, or "always".')
    device: str | None = setting(
        None, "cpu, cuda or cuda:1.", more="Where a model runs that is given by name.", default_text="the CPU"
    )
    device_memory: str | int | None = setting(
        None,
        "Limit of the device's memory for weights, caches and buffers together ('16GiB'); layers that do not fit are "
        "copied there in every step.",
        more="They come from the host's memory, of which they take at most `memory`; what is more is read from the "
        "model's folder. With `memory` a plan may put keys and values there too, and on `disk`.",
        default_text="no limit",
    )

    def __post_init__(self) -> None:
        check_settings(self)
