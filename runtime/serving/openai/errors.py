"""Errors as OpenAI's clients know them: a status, and one object with message, type, param and code."""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from hemiola.runtime.errors import ABSENT, Busy, Cancelled, Failed, Lost, Name, Refused, as_option
from hemiola.runtime.options import ServeConfig

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
RETRY_AFTER_S = 1  # where nobody knows better
CODES = {"unknown": "unknown_parameter", "missing": "missing_required_parameter"}  # others are invalid_value
Names = Mapping[str, str]  # our path -> the path in a body


class ApiError(Exception):
    """An answer that is an error; `type` follows from the status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float = RETRY_AFTER_S,
    ) -> None:
        super().__init__(message)
        self._retry_after_s = retry_after_s
        self.status = status
        self.param = param
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        more = {"param": self.param, "code": self.code, "retry_after_s": self._retry_after_s}
        return partial(ApiError, **more), (self.status, str(self))

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(math.ceil(self._retry_after_s))} if self.status in (429, 503) else {}

    def body(self) -> dict[str, Any]:
        server = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = TYPES.get(self.status, server)
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def api_error(error: Exception, names: Names | None = None) -> ApiError:
    """What was refused or failed, in the names of a body."""
    match error:
        case ApiError():
            return error
        case Refused():
            return refusal(error.renamed(partial(in_body, names or {})), error)
        case Busy():
            return ApiError(429, str(error), code="overloaded", retry_after_s=error.retry_after_s)
        case Failed():
            return ApiError(503, str(error), code="engine_failed")
        case Lost():
            return ApiError(503, str(error), code="server_lost")
        case Cancelled():
            return ApiError(503, str(error), code="cancelled")
        case _:
            return ApiError(500, str(error) or type(error).__name__, code="internal_error")


@contextlib.contextmanager
def named(names: Names) -> Iterator[None]:
    """What is refused there has the names of a body's fields."""
    try:
        yield
    except Refused as error:
        raise api_error(error, names) from None


def refusal(renamed: Refused, error: Refused) -> ApiError:
    code = CODES.get(error.code, "invalid_value") if error.field else None
    if (error.code, error.field) == ("too_long", "prompt"):
        code = "context_length_exceeded"
    return ApiError(400, str(renamed), param=renamed.field or None, code=code)


def in_body(names: Names, name: Name) -> str:
    """A door: a field of a body, or an option of the server."""
    if name.field in ServeConfig.model_fields and name.value is not ABSENT:
        return as_option(name)
    field = in_names(names, name.field)
    return field if name.value is ABSENT else f'"{field}": {json.dumps(name.value)}'


def in_names(names: Names, field: str) -> str:
    """By the longest path in `names` that leads to the field."""
    for ours in sorted(names, key=len, reverse=True):
        if field == ours or field.startswith((f"{ours}.", f"{ours}[")):
            return names[ours] + field.removeprefix(ours)
    return field
