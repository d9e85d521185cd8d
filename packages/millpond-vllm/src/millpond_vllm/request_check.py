"""Check of a request's settings in the front process, where a wrong one is an error of that request alone."""

from __future__ import annotations

from typing import Any

from vllm.v1.sample.logits_processor import LogitsProcessor

from millpond_vllm.settings import RequestSettings


class RequestCheck(LogitsProcessor):
    """A logits processor that changes no logits: vLLM asks its class about the parameters of each request."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse wrong settings of a request.

        Raises:
            ValueError: a setting is unknown or out of range; vLLM answers with status 400.
        """
        RequestSettings.parse(sampling_params.extra_args)

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        del vllm_config, device, is_pin_memory

    def apply(self, logits: Any) -> Any:
        """Return the logits as they are."""
        return logits

    def is_argmax_invariant(self) -> bool:
        """Return True: greedy sampling may leave this out."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """Do nothing: there is no state."""
