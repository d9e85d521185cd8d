"""Op set for CUDA in Triton, with the names, arguments and meaning of `millpond.kernels.reference`.

With TRITON_INTERPRET=1 in the environment before the first import of Triton, the kernels run on CPU tensors.
"""

from millpond.errors import OptionError
from millpond.install_command import install_command

try:
    import triton as _triton  # noqa: F401
except ImportError as error:
    raise OptionError(f"the gpu kernels need Triton; install it with: {install_command('gpu')}") from error

# in torch: its matrix products will do
from millpond.kernels.eager.attention import absolute_sums, attend, newest_alike
from millpond.kernels.eager.packed_pages import read_packed
from millpond.kernels.gpu.admit import admit
from millpond.kernels.gpu.block_sums import block_sums
from millpond.kernels.gpu.decode import decode, decode_rows, decode_shared
from millpond.kernels.gpu.pages import read, read_scores, write
from millpond.kernels.gpu.prefill import prefill
from millpond.kernels.gpu.selection import best_columns, move_entries, shared_counts
from millpond.kernels.gpu.transform import decode_pages, encode_planes, project
from millpond.kernels.gpu.window import window_signal, window_sums
from millpond.kernels.gpu.write_packed import write_packed
from millpond.kernels.merge.reference import merge_slots

__all__ = [
    "absolute_sums",
    "admit",
    "attend",
    "best_columns",
    "block_sums",
    "decode",
    "decode_pages",
    "decode_rows",
    "decode_shared",
    "encode_planes",
    "merge_slots",
    "move_entries",
    "newest_alike",
    "prefill",
    "project",
    "read",
    "read_packed",
    "read_scores",
    "shared_counts",
    "window_signal",
    "window_sums",
    "write",
    "write_packed",
]
