"""Every error of the gateway in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from honed.errors import BadRequest, EngineError, HonedError, NotFound, StoreError, UserError
from honed.log import log


def error_body(message: str, type: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an error."""
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def response_of(error: Exception) -> JSONResponse:
    """The response that an exception stands for; only what nobody foresaw is a 500."""
    if isinstance(error, BadRequest):
        return _json(error.status, str(error), "invalid_request_error", error.param, error.code)
    if isinstance(error, NotFound):
        return _json(404, str(error), "invalid_request_error", "model", "model_not_found")
    if isinstance(error, UserError):
        return _json(400, str(error), "invalid_request_error")
    if isinstance(error, EngineError | StoreError):
        return _json(503, str(error), "server_error", None, "engine_unavailable")
    log("api.failed", error=repr(error))
    return _json(500, "the server failed; its log says why.", "server_error")


def install(app: FastAPI) -> None:
    """Makes every error of the app speak OpenAI's shape."""

    async def on_error(request: Request, error: Exception) -> JSONResponse:
        return response_of(error)

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = f"{error.detail}: {request.method} {request.url.path}"
        return _json(
            error.status_code,
            message,
            "invalid_request_error",
            None,
            "unknown_url" if error.status_code == 404 else None,
        )

    async def on_invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        return _json(400, str(first["msg"]), "invalid_request_error", ".".join(map(str, first["loc"][1:])) or None)

    app.add_exception_handler(HonedError, on_error)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(Exception, on_error)


def _json(status: int, message: str, type: str, param: str | None = None, code: str | None = None) -> JSONResponse:
    headers = {"retry-after": "1"} if status == 503 else None
    return JSONResponse(error_body(message, type, param, code), status, headers=headers)
