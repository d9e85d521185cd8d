"""Requests drawn from the server's own description: whatever comes, no answer is a failure of the server's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode

from millpond.server.app import create_app
from tests.helpers.server.fake import FakeLLM
from tests.helpers.server.live import Live, live

schema = schemathesis.openapi.from_dict(create_app(FakeLLM()).openapi())
schema.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(FakeLLM) as running:
        yield running


@schema.parametrize()
@settings(
    max_examples=3,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_no_request_makes_the_server_fail(case: schemathesis.Case, server: Live) -> None:
    case.call_and_validate(base_url=server.url, checks=[not_a_server_error])
