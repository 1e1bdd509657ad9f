"""The gateway's routes, all of them, and the application that serves them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from honed.api import errors
from honed.api.chat import chat_completions
from honed.api.feedback import post_feedback
from honed.api.gateway import Gateway

Route = Callable[[Gateway, Request], Awaitable[Response]]


async def list_models(gateway: Gateway, request: Request) -> Response:
    """GET /v1/models: the line that is served, with the version behind it."""
    return JSONResponse({"object": "list", "data": [_model(gateway.fleet.line, gateway.fleet.serving)]})


async def show_model(gateway: Gateway, request: Request) -> Response:
    """GET /v1/models/NAME: a line, or a version of it that is loaded."""
    name = request.path_params["name"]
    fleet = gateway.fleet
    serving = fleet.version_of(name.partition("@")[0])
    return JSONResponse(_model(name, fleet.pinned(name) if "@" in name else serving))


def _model(name: str, version: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "honed", "version": version}


async def health(gateway: Gateway, request: Request) -> Response:
    """GET /healthz: alive, and what serves; 503 with the reason when nothing can be served any more."""
    problem = gateway.fleet.problem
    return JSONResponse(
        {
            "status": "failed" if problem else "ok",
            "reason": problem,
            "line": gateway.fleet.line,
            "version": gateway.fleet.serving,
            "capture_backlog_bytes": gateway.drainer.backlog_bytes,
            "capture_dropped": gateway.capture.dropped,
        },
        503 if problem else 200,
    )


async def metrics(gateway: Gateway, request: Request) -> Response:
    """GET /metrics, for Prometheus."""
    meters = gateway.meters
    meters.backlog.set(gateway.drainer.backlog_bytes)
    meters.dropped.set(gateway.capture.dropped)
    meters.version.clear()
    meters.version.labels(gateway.fleet.serving).set(1)
    return Response(meters.render(), media_type="text/plain; version=0.0.4")


ROUTES: tuple[tuple[str, str, Route], ...] = (
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/feedback", post_feedback),
    ("GET", "/v1/models", list_models),
    ("GET", "/v1/models/{name}", show_model),
    ("GET", "/healthz", health),
    ("GET", "/metrics", metrics),
)


def build(gateway: Gateway) -> FastAPI:
    """The application over a gateway's parts."""
    app = FastAPI(title="honed", docs_url=None, redoc_url=None, openapi_url=None)
    errors.install(app)
    for method, path, route in ROUTES:
        app.add_api_route(path, _endpoint(gateway, path, route), methods=[method])
    return app


def _endpoint(gateway: Gateway, path: str, route: Route) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        status, started = 500, time.monotonic()
        try:
            response = await route(gateway, request)
            status = response.status_code
            response.headers["x-honed-seconds"] = f"{time.monotonic() - started:.4f}"
            return response
        except Exception as error:
            response = errors.response_of(error)
            status = response.status_code
            return response
        finally:
            gateway.meters.requests.labels(path, status).inc()

    return endpoint
