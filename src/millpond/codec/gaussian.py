"""A table of numbers for entries after a Hadamard rotation, which are nearly Gaussian (Lloyd, 1957/1982; Max, 1960)."""

from __future__ import annotations

from millpond.kernels.packed.layout import Format, Side

#: The eight numbers of least squared error for Gaussian numbers brought to [-1, 1] by the range of their own token, 64
#: and 128 channels in equal parts: `nuq.kmeans` on random ones (tests/codec/test_gaussian.py), made symmetric.
GAUSSIAN3 = (-0.8515625, -0.53515625, -0.30078125, -0.09765625, 0.09765625, 0.30078125, 0.53515625, 0.8515625)

#: Codes of three bits per token, a quarter less squared error there than integers of as many bits.
TABLE3 = Side(Format.NUQ3, table=GAUSSIAN3)
