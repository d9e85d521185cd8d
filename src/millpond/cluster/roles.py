"""Role: the part of a request that a worker does."""

from __future__ import annotations

from typing import Literal

#: Who reads prompts and decodes ("replica"), or only one of the two.
Role = Literal["replica", "prefill", "decode"]
