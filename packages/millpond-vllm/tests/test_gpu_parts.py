"""Parts for GPUs that need no GPU: builders of metadata, rows of both model runners, backends that are chosen."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from vllm_helpers.engines import need_vllm

need_vllm()

BLOCK = 16


@pytest.fixture(scope="module")
def config(tiny_model):
    from vllm.engine.arg_utils import EngineArgs

    import millpond_vllm

    args = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 1024, "enforce_eager": True}
    return EngineArgs(
        model=tiny_model, block_size=32, max_num_seqs=8, **args, **millpond_vllm.engine_args("snapkv", "30%")
    ).create_engine_config()


@pytest.fixture
def graphs(config):
    """The configuration, with recorded graphs for whole steps."""
    from vllm.config import CUDAGraphMode

    compilation = config.compilation_config
    before = compilation.cudagraph_mode, compilation.max_cudagraph_capture_size
    compilation.cudagraph_mode, compilation.max_cudagraph_capture_size = CUDAGraphMode.FULL_AND_PIECEWISE, 8
    compilation.cudagraph_capture_sizes = [1, 2, 4, 8]
    yield config
    compilation.cudagraph_mode, compilation.max_cudagraph_capture_size = before
    compilation.cudagraph_capture_sizes = []


@pytest.fixture
def layer(config):
    """A layer of attention that a builder finds by name, with a state whose requests are named by a test."""
    from vllm.model_executor.layers.attention import Attention

    from millpond_vllm.attention_backend import STATE
    from millpond_vllm.null_blocks import NullBlocks

    made = Attention.__new__(Attention)
    torch.nn.Module.__init__(made)
    made.num_heads = 4
    names = ["long", "short"]
    nulls = NullBlocks(BLOCK, lambda step: names)
    state = SimpleNamespace(block=BLOCK, nulls=nulls, plan_step=lambda given, lengths: (given, lengths))
    setattr(made, STATE, (state, 0))
    context = config.compilation_config.static_forward_context
    context["layer"] = made
    yield made
    del context["layer"]


def spec(block=BLOCK):
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from millpond_vllm.block_manager import EvictingSpec

    return EvictingSpec.of(FullAttentionSpec(block_size=block, num_kv_heads=2, head_size=32, dtype=torch.bfloat16))


def step(rows, lengths, host=True):
    """Return the metadata of a step in which each request decodes one token."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    count = len(lengths)
    starts = torch.arange(count + 1, dtype=torch.int32)
    counts = torch.tensor(lengths, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=counts,
        num_reqs=count,
        num_actual_tokens=count,
        max_query_len=1,
        max_seq_len=max(lengths),
        block_table_tensor=torch.tensor(rows, dtype=torch.int32),
        slot_mapping=torch.zeros(count, dtype=torch.int64),
        seq_lens_cpu_upper_bound=counts.clone() if host else None,
    )


ROWS = [[5, 6, 0, 0, 7, 0], [8, 9, 0, 0, 0, 0]]
LENGTHS = [70, 20]


def told(layer):
    from millpond_vllm.attention_backend import STATE
    from millpond_vllm.messages import Eviction

    getattr(layer, STATE)[0].nulls.take([Eviction("long", [], [], [], 64, 0, [5, 6, 0, 0, 7])])


def builders():
    from millpond_vllm.backends.flash_attn import EvictingFlashAttentionBuilder
    from millpond_vllm.backends.triton import EvictingTritonBuilder

    return {"flash": EvictingFlashAttentionBuilder, "triton": EvictingTritonBuilder}


@pytest.mark.parametrize("name", ["flash", "triton"])
def test_metadata_shows_no_null_block(graphs, layer, name):
    told(layer)
    builder = builders()[name](spec(), ["layer"], graphs, torch.device("cpu"))
    made = builder.build(0, step(ROWS, LENGTHS))
    assert made.block_table[0, :3].tolist() == [5, 6, 7]
    assert made.block_table[1, :2].tolist() == [8, 9]
    assert made.seq_lens.tolist() == [38, 20]
    assert made.max_seq_len == 38, "the host knows it without asking the device"
    assert not builder.supports_update_block_table
    again = builder.build(0, step(ROWS[::-1], LENGTHS[::-1]))
    assert again.block_table.data_ptr() == made.block_table.data_ptr(), "a recorded graph reads this address"
    assert again.seq_lens.data_ptr() == made.seq_lens.data_ptr()
    assert again.seq_lens.tolist() == [20, 38]


def test_the_worker_counts_in_blocks_of_the_manager(config, layer):
    """The kernel's blocks are half as long: it sees block 5 as 10 and 11, and the null block as 0 and 1."""
    from millpond_vllm.attention_backend import STEP

    told(layer)
    builder = builders()["triton"](spec(BLOCK // 2), ["layer"], config, torch.device("cpu"))
    made = builder.build(0, step([[10, 11, 12, 13, 0, 1, 0, 1, 14, 15], [16, 17, 18, 19, 0, 0, 0, 0, 0, 0]], LENGTHS))
    assert made.block_table[0, :5].tolist() == [10, 11, 12, 13, 14]
    assert made.seq_lens.tolist() == [38, 20]
    seen, lengths = getattr(made, STEP)
    assert seen.block_table_tensor[:, :3].tolist() == [[5, 6, 7], [8, 9, 0]]
    assert lengths.tolist() == LENGTHS


def test_layers_that_do_not_evict_are_built_as_they_are(graphs, layer):
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    told(layer)
    plain = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.bfloat16, sliding_window=64)
    given = step(ROWS, LENGTHS)
    made = builders()["flash"](plain, ["layer"], graphs, torch.device("cpu")).build(0, given)
    assert made.block_table is given.block_table_tensor
    assert made.seq_lens.tolist() == LENGTHS


def test_a_backend_that_plans_on_the_host_plans_no_null_block(config, layer):
    """As FlashInfer does: pages by the host's lengths, ids from the device's rows."""
    from vllm.v1.attention.backend import AttentionMetadataBuilder

    from millpond_vllm.attention_backend import EvictingBuilder

    class PlansOnHost(AttentionMetadataBuilder):
        def __init__(self, *args):
            super().__init__(*args)

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            given = common_attn_metadata
            lengths = given.seq_lens_cpu_upper_bound
            if lengths is None:
                lengths = given.seq_lens.cpu()
            pages = (lengths + BLOCK - 1) // BLOCK
            rows = [row[:count].tolist() for row, count in zip(given.block_table_tensor, pages, strict=True)]
            return SimpleNamespace(rows=rows)

    class Evicting(EvictingBuilder, PlansOnHost):
        pass

    told(layer)
    builder = Evicting(spec(), ["layer"], config, torch.device("cpu"))
    assert builder.build(0, step(ROWS, LENGTHS)).rows == [[5, 6, 7], [8, 9]]
    assert builder.build(0, step(ROWS, LENGTHS, host=False)).rows == [[5, 6, 7], [8, 9]]


@pytest.mark.parametrize(
    ("method", "options", "support"),
    [
        ("snapkv", {}, "UNIFORM_SINGLE_TOKEN_DECODE"),
        ("streaming", {}, "UNIFORM_SINGLE_TOKEN_DECODE"),
        ("tova", {}, "NEVER"),
        ("h2o", {}, "NEVER"),
    ],
)
def test_methods_that_read_queries_while_decoding_record_no_attention(config, method, options, support):
    import millpond_vllm

    before = config.additional_config
    config.additional_config = millpond_vllm.engine_args(method, 400, **options)["additional_config"]
    try:
        found = builders()["triton"].get_cudagraph_support(config, spec())
    finally:
        config.additional_config = before
    assert found.name == support


def test_other_layers_keep_what_their_backend_records(config):
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    plain = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.bfloat16, sliding_window=64)
    assert builders()["triton"].get_cudagraph_support(config, plain).name == "ALWAYS"


# ---------------------------------------------------------------------- rows


class TableV1:
    def __init__(self):
        self.rows = {}

    def add_row(self, row, index):
        self.rows[index] = list(row)


def test_rows_of_the_first_runner_change_while_no_copy_is_in_flight():
    from millpond_vllm import compat

    waited = []

    @contextmanager
    def synchronize_input_prep():
        waited.append("begin")
        yield
        waited.append("end")

    class Table(TableV1):
        def add_row(self, row, index):
            assert waited == ["begin"]
            super().add_row(row, index)

    tables = [Table(), Table()]
    runner = SimpleNamespace(
        requests={"a": SimpleNamespace(block_ids=([1, 2], [3, 4]))},
        input_batch=SimpleNamespace(req_id_to_index={"a": 5}, block_table=tables, req_ids=["b", "a"]),
        synchronize_input_prep=synchronize_input_prep,
    )
    compat.set_row(runner, "a", [9, 0, 4], 1)
    assert waited == ["begin", "end"]
    assert runner.requests["a"].block_ids == ([1, 2], [9, 0, 4])
    assert tables[0].rows == {}
    assert tables[1].rows == {5: [9, 0, 4]}
    assert compat.row_requests(runner, None) == ["b", "a"]


class TablesV2:
    """The second runner's tables, by the same rules: rows are staged, counts are set at once."""

    def __init__(self, groups):
        self.block_tables = [SimpleNamespace(rows={}) for _ in range(groups)]
        for table in self.block_tables:
            table.stage_write = lambda index, start, row, table=table: table.rows.setdefault(index, {}).update(
                {start + at: block for at, block in enumerate(row)}
            )
        self.num_blocks = SimpleNamespace(np=torch.zeros(groups, 8, dtype=torch.int32).numpy())

    def append_block_ids(self, index, blocks, overwrite):
        for group, row in enumerate(blocks):
            start = 0 if overwrite else self.num_blocks.np[group, index]
            self.block_tables[group].stage_write(index, start, row)
            self.num_blocks.np[group, index] = start + len(row)


def test_rows_of_the_second_runner_change_in_one_group_alone():
    from millpond_vllm import compat

    tables = TablesV2(2)
    tables.append_block_ids(3, ([1, 2, 3, 4], [5, 6, 7, 8]), overwrite=True)
    states = SimpleNamespace(req_id_to_index={"a": 3}, index_to_req_id={3: "a"})
    runner = SimpleNamespace(req_states=states, block_tables=tables)
    compat.set_row(runner, "a", [9, 0, 0, 4], 0)
    tables.append_block_ids(3, ([10], [11]), overwrite=False)
    assert list(tables.block_tables[0].rows[3].values()) == [9, 0, 0, 4, 10]
    assert list(tables.block_tables[1].rows[3].values()) == [5, 6, 7, 8, 11]
    assert tables.num_blocks.np[:, 3].tolist() == [5, 5]
    assert compat.row_requests(runner, SimpleNamespace(req_idx=[3, -1])) == ["a", None]
    assert compat.row_requests(runner, SimpleNamespace(req_idx=None)) is None


# ---------------------------------------------------------------------- choice


def test_our_backends_stand_in_the_registry_while_layers_are_built():
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from millpond_vllm import compat
    from millpond_vllm.gpu_worker import MillpondGPUWorker

    before = {name: AttentionBackendEnum[name].get_path() for name in MillpondGPUWorker.backends}
    with compat.backends_in_use(MillpondGPUWorker.backends):
        for name, path in MillpondGPUWorker.backends.items():
            assert AttentionBackendEnum[name].get_path() == path
        flash = AttentionBackendEnum["FLASH_ATTN"].get_class()
        assert flash.get_name() == "FLASH_ATTN"
        assert flash.get_builder_cls() is builders()["flash"]
        assert type(flash.customize_spec(spec())).__name__ == "EvictingSpec"
    assert {name: AttentionBackendEnum[name].get_path() for name in before} == before


def test_queries_of_eight_bits_are_read_with_their_factor():
    from millpond_vllm.attention_backend import plain_queries

    query = torch.tensor([[[1.0, -2.0]]]).to(torch.float8_e4m3fn)
    layer = SimpleNamespace(_q_scale=torch.tensor(0.5), dtype=torch.bfloat16)
    assert plain_queries(layer, query).tolist() == [[[0.5, -1.0]]]
    plain = torch.ones(1, 1, 2)
    assert plain_queries(layer, plain) is plain


def test_the_gpu_worker_reads_its_caches_by_strides():
    from millpond_vllm.gpu_worker import MillpondGPUWorker

    worker = MillpondGPUWorker.__new__(MillpondGPUWorker)
    layer = SimpleNamespace(module=SimpleNamespace(head_size=32), cache=torch.zeros(4, 2, 16, 64))
    layout = worker.layout(layer, 64)
    assert (layout.key_dim, layout.parts) == (32, 4)


def test_sinks_of_a_layer_are_read_from_its_attention():
    from millpond_vllm.worker import _shape_of

    impl = SimpleNamespace(scale=0.5, logits_soft_cap=None, sinks=torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    found = _shape_of(SimpleNamespace(impl=impl))
    assert found.sink_logits.tolist() == [1.0, 2.0]
    assert found.sink_logits.dtype == torch.float32
    impl.sinks, impl.logits_soft_cap = None, 30.0
    found = _shape_of(SimpleNamespace(impl=impl))
    assert found.sink_logits is None
    assert found.softcap == 30
