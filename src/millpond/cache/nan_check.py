"""Detection of NaN in attention, without a decoding step waiting for the device."""

from __future__ import annotations

from torch import Tensor

from millpond.errors import NumericsError

#: On a GPU, columns between two looks at whether attention became NaN.
NAN_CHECK_COLUMNS = 64


class NanCheck:
    """What one layer has noticed of its attention since the last look."""

    def __init__(self, layer: int) -> None:
        self._layer = layer
        self._nan: Tensor | None = None

    def check(self, lse: Tensor, columns: int) -> None:
        """Refuse NaN at once on the CPU; elsewhere once in a while, so that no step waits for the device.

        Args:
            lse: the log-sum-exp of a step's attention. columns: that the layer had seen before.

        Raises:
            NumericsError: attention is NaN.
        """
        if lse.device.type == "cpu":
            total = lse.sum().item()  # in fewer calls than isnan().any(); -inf of those who saw nothing stays -inf
            self._refuse(total != total)
            return
        self._nan = lse.isnan().any() if self._nan is None else self._nan | lse.isnan().any()
        if columns % NAN_CHECK_COLUMNS:
            return
        nan, self._nan = bool(self._nan.any()), None
        self._refuse(nan)

    def check_layers(self, lse: Tensor, columns: int) -> None:
        """The same for this layer and those after it, whose steps ran together on a device: lse (layers, S, Hq).

        Raises:
            NumericsError: attention of one of them is NaN.
        """
        found = lse.isnan().flatten(1).any(1)
        self._nan = found if self._nan is None else self._nan | found
        if columns % NAN_CHECK_COLUMNS:
            return
        nan, self._nan = self._nan.tolist(), None
        if any(nan):
            self._refuse(True, nan.index(True))

    def _refuse(self, nan: bool, behind: int = 0) -> None:
        if nan:
            raise NumericsError(f"layer {self._layer + behind}: attention is NaN; check the model's weights and inputs")
