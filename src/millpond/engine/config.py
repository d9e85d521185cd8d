"""Settings of an engine, checked when they are put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from millpond.budget import parse_bytes
from millpond.cache.pages.page_slots import check_slots
from millpond.cache.paging.choose import LIVE, keeps_prompts, rule_named
from millpond.codec import before_rope, codec_text, codecs_of, resolve
from millpond.engine.settings import EngineSettings
from millpond.engine.storage_codec import check_storage
from millpond.errors import OptionError
from millpond.hf.cache_spec import budget_of, policy_of
from millpond.hf.fit import check_bound, is_auto
from millpond.methods import METHODS
from millpond.policy.rolling import rolling_policy
from millpond.presets import Choice, choose
from millpond.runner.packed_model import check_format
from millpond.runner.runner_choice import check_own_layers
from millpond.setting import split_options

#: Tokens at whose multiples a deterministic engine cuts prompts.
PROMPT_BLOCK = 256


@dataclass(frozen=True, kw_only=True)
class EngineConfig(EngineSettings):
    """Settings of an engine: defaults of its requests, and the limits of all of them together.

    Its fields say themselves what they mean, see `EngineSettings`; a table is in docs/reference/settings.md.

    Raises:
        OptionError, BudgetError: a value out of range, or a method, option, codec, paging rule or runner that does not
            exist.
        DataError: a pager that cannot be read.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_slots(self.page_slots)
        if self.storage_codec is not None and self.prefix_cache == LIVE:  # codes are for what waits
            object.__setattr__(self, "prefix_cache", True)
        if self.cache_disk is not None and self.cache_dir is None:
            raise OptionError(f"cache_disk={self.cache_disk!r} limits the files in cache_dir=; give that too")
        rule_named(self.prefix_cache, self.pager)
        self._check_prefix_disk()
        check_format(self.weights)
        check_own_layers(self.runner, self.native_layers, weights=self.weights, deterministic=self.deterministic)
        self._check_blocks()
        method, budget, codec, _ = self.choice
        object.__setattr__(self, "options", METHODS.get(method).with_files_read(dict(self.options or {})))
        policy = policy_of(method, dict(self.options))
        check_bound(budget, self.max_kl)
        if not is_auto(budget):
            budget_of(method, budget, policy)
        if self.codec is not None:
            object.__setattr__(self, "codec", codec_text(self.codec))
        codecs = codecs_of(resolve(codec))
        if self.overflow == "rolling":
            codecs = [before_rope(each_codec) for each_codec in codecs]
            policy = rolling_policy(policy, method, bool(codecs))
        for each_codec in codecs:
            policy.check_codec(each_codec)
        if self.storage_codec is not None:
            check_storage(self, str(method), policy, codecs)

    @property
    def choice(self) -> Choice:
        """Method, budget and number format of requests that name none.

        They are as given, of the preset, or the default, which evicts nothing; with a budget, options or texts that
        continue beyond the context, `h2o`.

        Raises:
            OptionError: a preset together with what it decides.
        """
        evicting = bool(self.options) or self.overflow == "rolling"
        return choose(self.method, self.budget, self.codec, self.preset, evicting)

    def _check_prefix_disk(self) -> None:
        """Check that a disk of the prefix cache has its size and a prefix cache.

        Raises:
            OptionError: one of them is missing.
        """
        if self.prefix_disk is None:
            if self.prefix_folder is not None:
                raise OptionError("prefix_folder= is where prefix_disk= lies; give its size, such as '2GiB', too")
            return
        if not keeps_prompts(self.prefix_cache):
            raise OptionError(f"prefix_disk={self.prefix_disk!r} is for a prefix cache; give prefix_cache=True, too")

    @classmethod
    def of(cls, config: EngineConfig | None, options: Mapping[str, Any]) -> EngineConfig:
        """Return `config`, or the defaults if it is None, with `options` in place of its values.

        Raises:
            OptionError, BudgetError: as of the class.
            TypeError: a name that is no setting.
        """
        (user_options,) = split_options("EngineConfig", options, cls)
        return cls(**user_options) if config is None else replace(config, **user_options) if user_options else config

    def _check_blocks(self) -> None:
        if not self.deterministic:
            return
        if self.max_step_tokens < PROMPT_BLOCK:
            raise OptionError(
                f"max_step_tokens={self.max_step_tokens} must be at least {PROMPT_BLOCK} with deterministic=True, "
                "which reads prompts in blocks of as many tokens"
            )
        if self.chunk_store is not None:
            raise OptionError(
                "chunk_store= takes over keys and values that depend on what stood before a chunk when it was read; "
                "leave it out with deterministic=True"
            )
        if self.cache_dir is not None:
            raise OptionError(
                "cache_dir= goes on from decoded tokens, which have other bits than the same tokens in a prompt; leave "
                "it out with deterministic=True"
            )

    def reach(self, context_length: int | None) -> int | None:
        """Return the positions after which gaps close and a text continues; None: it ends there.

        Raises:
            OptionError: texts should continue, and the model sets no limit.
        """
        if self.overflow == "refuse":
            return None
        if context_length is None:
            raise OptionError("overflow='rolling': this model sets no limit to a text; leave it out")
        return context_length

    @property
    def prompt_block(self) -> int | None:
        """Prompts are cut at multiples of this many tokens only; None: they are cut anywhere."""
        return PROMPT_BLOCK if self.deterministic else None

    @property
    def kv_limit(self) -> int | None:
        """`kv_memory` in bytes."""
        return None if self.kv_memory is None else parse_bytes(self.kv_memory)
