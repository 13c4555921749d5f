"""The HTTP face: routes, and errors in OpenAI's form whatever raised them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import orjson
from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from common.errors import BatonError, ErrorKind
from router.gateway.errors import as_baton_error, error_response, framework_error_response
from router.gateway.http_request import admit_tenant, request_id_of, tenant_of, trace_of
from router.gateway.openai_endpoints import OpenAiEndpoints
from router.gateway.openai_models import ChatBody, CompletionBody
from router.gateway.state import GatewayState
from router.gateway.validation import check_model
from router.spec import Operation
from router.timeline import timeline_entry

Endpoint = Callable[[Request], Awaitable[Response]]
_JSON: Final = "application/json"
_SCHEMA_PATH: Final = "#/components/schemas/"


def build_app(state: GatewayState) -> FastAPI:
    """The ASGI application; it owns nothing and needs no lifespan."""
    app = _BatonApp(title="Baton", summary="OpenAI-compatible inference", redoc_url=None)
    app.add_exception_handler(HTTPException, _on_http_exception)

    def route(method: str, path: str, endpoint: Endpoint, body: type[BaseModel] | None = None) -> None:
        extra = {} if body is None else _documented_body(body)
        guarded = _guarded(state, endpoint, keyed=path.startswith("/v1/"))
        app.add_api_route(path, guarded, methods=[method], name=path, response_class=Response, openapi_extra=extra)

    openai, ops = OpenAiEndpoints(state), _OpsEndpoints(state)
    route("POST", "/v1/completions", openai.completions, CompletionBody)
    route("POST", "/v1/chat/completions", openai.chat, ChatBody)
    route("GET", "/v1/models", ops.models)
    route("GET", "/v1/models/{model:path}", ops.model)
    route("GET", "/v1/requests/{request_id:path}/timeline", ops.timeline)
    route("GET", "/health", ops.health)
    route("GET", "/ready", ops.ready)
    route("GET", "/metrics", ops.metrics)
    return app


class _BatonApp(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """Bodies are parsed by hand, once, with messages of our own; so their schemas are added by hand, too."""
        if self.openapi_schema is None:
            _, schemas = models_json_schema(
                [(CompletionBody, "validation"), (ChatBody, "validation")], ref_template=_SCHEMA_PATH + "{model}"
            )
            super().openapi().setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        return super().openapi()


class _OpsEndpoints:
    """What clients, orchestrators and monitoring ask about the server itself."""

    def __init__(self, state: GatewayState) -> None:
        self._state = state

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._model_object()]})

    async def model(self, request: Request) -> Response:
        check_model(self._state.model, request.path_params["model"])
        return _json(self._model_object())

    async def timeline(self, request: Request) -> Response:
        """Of all that runs or has ended lately under this id, oldest first."""
        state, request_id = self._state, request.path_params["request_id"]
        known = [*state.timeline.find(request_id), *(run.look() for run in state.dispatcher.find(request_id))]
        tenant = tenant_of(request).name
        records = [record for record in known if record.tenant == tenant]
        if not records:
            message = (
                f"no request {request_id[:128]!r} is known here: none such runs on this router, and none is among the "
                f"last {state.timeline.capacity} that ended (timeline_entries)"
            )
            return framework_error_response(404, message, request_id_of(request), {})
        lead_s = time.time() - state.clock()
        return _json({"object": "list", "data": [timeline_entry(record, lead_s) for record in records]})

    async def health(self, request: Request) -> Response:
        """The process lives and its event loop turns."""
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """200 only while a request would be served."""
        if self._state.ready:
            return _json({"status": "ready"})
        if not self._state.dispatcher.accepting:
            raise BatonError(ErrorKind.DRAINING, "the router is shutting down")
        missing = [role for role in ("prefill", "decode") if not self._state.fleet.usable(role)]
        raise BatonError(ErrorKind.NO_WORKER, f"no connected worker for: {', '.join(missing)}")

    async def metrics(self, request: Request) -> Response:
        return Response(self._state.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    def _model_object(self) -> dict[str, Any]:
        model = self._state.model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "baton",
            "max_model_len": model.max_model_len,
        }


def _guarded(state: GatewayState, endpoint: Endpoint, *, keyed: bool) -> Endpoint:
    """Writes whatever the endpoint raises as an error object. keyed: for tenants only."""

    async def guarded(request: Request) -> Response:
        request_id, received_at = request_id_of(request), state.clock()
        try:
            if keyed:
                admit_tenant(request, state.tenants)
            return await endpoint(request)
        except Exception as error:
            known = as_baton_error(error, request_id)
            if request.method == "POST":
                operation: Operation = "chat" if request.url.path.endswith("/chat/completions") else "text_completion"
                state.refuse(known, request_id, trace_of(request, state.sampler), operation, received_at)
            return error_response(known, request_id)

    return guarded


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Unknown routes and methods."""
    if not isinstance(error, HTTPException):
        raise error
    message = f"{error.detail}: {request.method} {request.url.path}"
    return framework_error_response(error.status_code, message, request_id_of(request), dict(error.headers or {}))


def _documented_body(body: type[BaseModel]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {_JSON: {"schema": {"$ref": _SCHEMA_PATH + body.__name__}}}}}


def _json(content: Any) -> Response:
    return Response(orjson.dumps(content), media_type=_JSON)
