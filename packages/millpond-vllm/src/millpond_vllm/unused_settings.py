"""Refusal of settings without the classes that use them, which vLLM would ignore: a plugin of `vllm.general_plugins`.

Every process of vLLM loads this module where the package is installed, whether or not it is asked for: it imports
nothing, and changes nothing.
"""

from __future__ import annotations

import sys

#: Key of the settings in `additional_config`.
_KEY = "millpond"


def refuse_unused_settings() -> None:
    """Refuse an engine that is given millpond's settings and not its scheduler and worker.

    vLLM tells its plugins nothing, so the command line is read, or where Python starts an engine, its arguments.

    Raises:
        OptionError: settings are given, and a class is not.
    """
    if _KEY in " ".join(sys.argv) or "--config" in sys.argv:
        from millpond_vllm.cli.vllm_arguments import unused_settings

        _refuse(unused_settings(sys.argv[1:]))
    from millpond_vllm.compat import engine_in_progress

    found = engine_in_progress()
    if found is not None and _KEY in (found[0] or {}):
        _refuse(not all("millpond_vllm" in str(one) for one in found[1:]))


def _refuse(bad: bool) -> None:
    if not bad:
        return
    from millpond import OptionError
    from millpond_vllm.engine_check import USE

    raise OptionError(
        f"additional_config has settings of millpond, and the scheduler and the worker are vLLM's own, which ignore "
        f"them: nothing would be evicted; {USE}"
    )
