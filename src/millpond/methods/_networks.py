"""Networks over hidden states as an option of methods: the file that it names."""

from __future__ import annotations

from collections.abc import Collection

from millpond.errors import DataError, OptionError
from millpond.option_files import read_file
from millpond.policy.trained.file import hidden_networks_of
from millpond.policy.trained.hidden_networks import HiddenNetworks
from millpond.policy.trained.kinds import NetworkKind


def named_networks(owner: str, path: str, kinds: Collection[NetworkKind]) -> HiddenNetworks | None:
    """Return the networks in the file that an option of `owner` names; None for no name.

    Raises:
        OptionError: it cannot be read, or holds networks of another kind.
    """
    if not path:
        return None
    try:
        return hidden_networks_of(read_file(path), str(path), kinds)
    except (OptionError, DataError) as error:
        raise OptionError(f"{owner}: networks={path!r}: {error}") from None
