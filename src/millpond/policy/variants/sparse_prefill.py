"""Policies whose prompts are read through sparse patterns (MInference)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from millpond.errors import CacheMismatchError
from millpond.policy.needs.declared import Needs
from millpond.policy.needs.prompt_patterns import Pattern
from millpond.policy.policy import Policy


@dataclass(frozen=True, slots=True)
class SparsePrefillPolicy(Policy):
    """Nothing leaves, and decoding attends to everything; the queries of a prompt attend to patterns of it.

    Attributes:
        pattern: of every head that the table does not name.
        table: by layer and query head.
    """

    pattern: Pattern = field(kw_only=True)
    table: Mapping[tuple[int, int], Pattern] = field(default_factory=dict)

    @property
    def needs(self) -> Needs:
        return Needs(whole_prompt=True, prompt_patterns=self)

    def patterns(self, layer: int, n_heads: int) -> list[Pattern]:
        """Pattern of each query head of a layer.

        Raises:
            CacheMismatchError: the table names a head that there is not.
        """
        beyond = [head for at, head in self.table if at == layer and head >= n_heads]
        if beyond:
            raise CacheMismatchError(
                f"layer {layer} has {n_heads} query heads; the table of patterns names head {max(beyond)}: take one of "
                "this model"
            )
        return [self.table.get((layer, head), self.pattern) for head in range(n_heads)]
