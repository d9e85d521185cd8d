"""POST /infill: llama.cpp's route for text in the middle, which editors call."""

from __future__ import annotations

import time
import uuid

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from millpond.engine.outputs import RequestOutput
from millpond.server.body_parsing import ParsedRoute
from millpond.server.fill_in import BETWEEN, PROJECT, FillIn, Ids, needed
from millpond.server.infill_format import InfillCall
from millpond.server.prompt_marks import IN_INFILL, refuse_marks
from millpond.server.request_mapping import check_room, most_tokens, requests, sampling
from millpond.server.schemas import InfillBody
from millpond.server.service import Service


def routes(service: Service) -> APIRouter:
    """Return the route that fills in."""
    router = APIRouter(route_class=ParsedRoute)

    @router.post("/infill", response_model=None)
    async def infill(body: InfillBody, http: HttpRequest) -> Response:
        """The text between two others."""
        api_call = await call_of(service, body)
        limit = body.t_max_predict_ms

        def enough(output: RequestOutput) -> bool:
            first = output.times.first_token
            late = bool(limit) and first is not None and 1e3 * (time.monotonic() - first) > (limit or 0)
            return late or api_call.enough(output)

        return await service.answer(http, api_call, enough)

    return router


async def call_of(service: Service, body: InfillBody) -> InfillCall:
    """Return the call that a body asks for, checked.

    Raises:
        ApiError, OptionError: it cannot be.
    """
    service.check_model(body.model)
    service.tokens.need("text in the middle", "input_prefix")
    service.tokens.check_fields(body)
    refuse_marks(body.millpond, IN_INFILL)
    fill = needed(service.tokens.fill_in, "/infill")
    max_tokens = None if body.n_predict in (None, -1) else body.n_predict
    most = most_tokens(max_tokens, service.settings.max_tokens, "n_predict")
    prompt = await _prompt(service, body, fill)
    check_room([prompt], max_tokens, service.llm.text_limit)
    given = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    params = sampling(
        body,
        max_tokens=None if most is None else max(most, 1),
        stop=fill.stops,
        stop_token_ids=(*(body.stop_token_ids or ()), *fill.stop_ids),
    )
    name = f"infill-{uuid.uuid4().hex}"
    made = requests(name, [prompt], params, body.millpond, body.cache_salt, service.settings.timeout_s)
    return InfillCall(made, body.n_indent, max_tokens != 0, tuple(body.response_fields or ()), given, bool(body.stream))


async def _prompt(service: Service, body: InfillBody, fill: FillIn) -> Ids:
    """Return the two texts after others, as the model expects them."""

    async def ids(text: str) -> Ids:
        return await service.tokens.encode(text, special=False) if text else ()

    extra = list(body.input_extra or ())
    others = sum(len(one.filename) + len(one.text) for one in extra)
    service.tokens.check_length(others + len(body.input_prefix) + len(body.input_suffix), "input_extra")
    before = body.input_prefix
    if extra and not fill.names_files:
        before = "".join(f"{one.text}{BETWEEN}" for one in extra) + before
    prompt = fill.prompt(await ids(before), await ids(body.input_suffix), await ids(body.prompt))
    if not extra or not fill.names_files:
        return prompt
    files = [await ids(f"{one.filename or 'file'}\n{one.text}\n") for one in extra]
    return fill.among_files(prompt, await ids(f"{PROJECT}\n"), [*files, await ids("file\n")])
