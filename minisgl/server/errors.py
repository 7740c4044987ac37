"""Errors on their way to the client: always OpenAI's JSON shape, always naming what to change."""

from __future__ import annotations

from typing import Any

import msgspec

from minisgl.core import ParameterError
from minisgl.message import ErrorInfo


class ApiError(Exception):
    """A request that is answered with an error."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message)
        self.info = info


def invalid(message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> ApiError:
    """The client's mistake; ``param`` is the field as the client wrote it."""
    return ApiError(ErrorInfo.invalid_request(message, param, code=code, status=status))


def invalid_parameter(error: ParameterError) -> ApiError:
    return invalid(str(error), error.field)


def unavailable(message: str, code: str) -> ErrorInfo:
    """The server cannot answer now."""
    return ErrorInfo(message=message, status=503, type="server_error", code=code)


def validation_error(errors: list[dict[str, Any]]) -> ErrorInfo:
    """The first of pydantic's complaints about a body, as one sentence that names the field."""
    first = errors[0]
    path = [part for part in first.get("loc", ()) if part != "body"]
    if first.get("type") == "json_invalid":
        at = f" at character {path[0]}" if path else ""
        detail = first.get("ctx", {}).get("error", "")
        return invalid(f"The body is not valid JSON: {detail}{at}.").info
    if not path:
        return invalid("The body must be a JSON object.").info
    param = str(path[0]) + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path[1:])
    return invalid(f"{param}: {first['msg']}.", param).info


def error_json(info: ErrorInfo) -> bytes:
    """The body of an error response, and the payload of an error in a stream."""
    return msgspec.json.encode(
        {"error": {"message": info.message, "type": info.type, "param": info.param, "code": info.code}}
    )
