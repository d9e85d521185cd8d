"""Result of a model type: its status, and that of each setting that was tried."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

EQUAL, REFUSED, WRONG, BROKEN, NOT_TRIED = "equal", "refused", "wrong", "broken", "not tried"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one method.

    Attributes:
        status: equal to stock (and, with few entries, to stock that masks evicted entries), refused with a typed error,
            wrong, or broken: an error that is not ours.
        reason: where it is not equal.
    """

    status: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one type.

    Attributes:
        status: the worst of its settings where that is a defect, else that of `full`.
        reason: why it was not tried, or is not equal in any setting.
        native_layers: layers that decode natively, of how many.
        outcomes: by the name of the setting; none where all are as the type is.
    """

    model_type: str
    status: str
    reason: str = ""
    native_layers: tuple[int, int] = (0, 0)
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, data: dict[str, Any]) -> Finding:
        """From what `as_dict` gave, also by way of JSON."""
        outcomes = {name: Outcome(**outcome) for name, outcome in data["outcomes"].items()}
        serving, layers = data["native_layers"]
        return cls(**data | {"outcomes": outcomes, "native_layers": (serving, layers)})
