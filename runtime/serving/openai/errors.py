"""Errors as OpenAI's clients know them: a status, and one object with message, type, param and code."""

import re
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from hemiola.runtime.api import SamplingParams
from hemiola.runtime.errors import Busy, Cancelled, Failed, Lost, Refused

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
RETRY_AFTER_S = 1  # where nobody knows better
NOT_LOADED = re.compile(r"Request for unknown model: .* has no available versions")  # tritonserver's words
TOO_LONG = re.compile(r"prompt is \d+ (tokens|characters), (and )?max_len=")
BAD_ID = re.compile(r"token id -?\d+ at position \d+ of the prompt")


class ApiError(Exception):
    """An answer that is an error; `type` follows from the status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int = RETRY_AFTER_S,
    ) -> None:
        super().__init__(message)
        self._retry_after_s = retry_after_s
        self.status = status
        self.param = param
        self.code = code

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(self._retry_after_s)} if self.status in (429, 503) else {}

    def body(self) -> dict[str, Any]:
        server = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = TYPES.get(self.status, server)
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def api_error(error: Exception) -> ApiError:
    """What the engine, or the way to it, said."""
    match error:
        case ApiError():
            return error
        case Refused():
            message = str(error)
            if TOO_LONG.search(message):
                return ApiError(400, message, param="prompt", code="context_length_exceeded")
            if BAD_ID.search(message):
                return ApiError(400, message, param="prompt", code="invalid_value")
            word = message.split(" ", 1)[0].removesuffix(":")
            param = word if word in SamplingParams.model_fields else None
            return ApiError(400, message, param=param, code="invalid_value" if param else None)
        case Busy():
            return ApiError(429, str(error), code="overloaded", retry_after_s=error.retry_after_s)
        case Failed():
            return ApiError(503, str(error), code="engine_failed")
        case RuntimeError() if NOT_LOADED.search(str(error)):
            return ApiError(503, "the model is not loaded now; try again in a moment", code="model_not_ready")
        case Lost():
            return ApiError(503, str(error), code="server_lost")
        case Cancelled():
            return ApiError(503, str(error), code="cancelled")
        case _:
            return ApiError(500, str(error) or type(error).__name__, code="internal_error")


def schema_error(error: ValidationError, names: Sequence[str]) -> ApiError:
    """What does not fit, by its place: the innermost, since a choice of types reports each of them."""
    first = max(error.errors(include_url=False), key=lambda one: len(one["loc"]))
    place = ""
    for step in first["loc"]:
        if isinstance(step, int):
            place += f"[{step}]"
        elif step.isidentifier() and step.islower() and step != "str":  # else it is a type's name
            place += f".{step}" if place else step
    if first["type"] == "json_invalid":
        return ApiError(
            400, f"the body is not JSON ({first['msg'].removeprefix('Invalid JSON: ')}); send a JSON object"
        )
    if first["type"] == "extra_forbidden":
        known = ", ".join(names)
        return ApiError(
            400, f"unknown option {place!r}; the options are {known}", param=place, code="unknown_parameter"
        )
    if first["type"] == "missing":
        return ApiError(400, f"{place} is missing; give it", param=place, code="missing_required_parameter")
    reason = re.sub("^(Input|String) should", "it should", first["msg"].removeprefix("Value error, "))
    given = repr(first["input"])
    if len(given) > 80:
        given = given[:80] + "..."
    message = f"{place} is {given}: {reason}" if place else f"the body is {given}: {reason}"
    return ApiError(400, message, param=place or None, code="invalid_value")
