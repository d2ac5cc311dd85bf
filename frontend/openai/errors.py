"""What an OpenAI client is told when something cannot be done: one exception, one JSON object, the right status."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import grpc
from starlette.exceptions import HTTPException

RETRY_AFTER = 1  # seconds a client is asked to wait when the queue is full
RETRY_AFTER_DOWN = 5  # and when the deployment is restarting


class ApiError(HTTPException):
    """`status`, and the fields of OpenAI's error object. Below 500 the request is wrong, and `param` names where."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.kind = kind
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.detail, "type": self.kind, "param": self.param, "code": self.code}}


def overloaded(message: str) -> ApiError:
    headers = {"retry-after": str(RETRY_AFTER)}
    return ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded", headers=headers)


def down(message: str) -> ApiError:
    headers = {"retry-after": str(RETRY_AFTER_DOWN)}
    return ApiError(503, message, kind="server_error", code="service_unavailable", headers=headers)


def internal(message: str) -> ApiError:
    return ApiError(500, message, kind="server_error", code="internal_error")


def from_triton(code: grpc.StatusCode, details: str, *, alive: bool, names: Mapping[str, str]) -> ApiError:
    """Triton's refusal or failure as a client of OpenAI's interface knows it.

    A model whose process has died is reported like a wrong request: whether it is `alive`, asked afterwards, tells.
    `names` has the request's field for the tensor that a message begins with.
    """
    message = details or code.name
    if code is grpc.StatusCode.INVALID_ARGUMENT and alive:
        tensor, _, rest = message.partition(" ")
        field = names.get(tensor)
        too_long = tensor in ("text_input", "messages") and ("context holds" in rest or "bytes long" in rest)
        return ApiError(
            400,
            f"{field} {rest}" if field else message,
            param=field,
            code="context_length_exceeded" if too_long else "invalid_value",
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return ApiError(
            504, "the answer did not come before the deadline", kind="server_error", code="deadline_exceeded"
        )
    if not alive:
        return down("the model cannot be reached at the moment; it is being restarted: try again")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return overloaded(message)
    return down(message) if code is grpc.StatusCode.UNAVAILABLE else internal(f"the engine failed: {message}")


def from_validation(errors: Sequence[Mapping[str, Any]], fields: Collection[str]) -> ApiError:
    """One paragraph for what a body's validation found: the first field that is wrong, and every form it may have.

    A field that may be of several types has an error for each; one of ours, which says most, goes before.
    """
    own = [error for error in errors if error["type"] == "field"]
    first = (own or list(errors))[0]
    path = [part for part in first["loc"] if part != "body"]
    if own:
        context = first["ctx"]
        where = _spell([part for part in path if not _is_type(part)] + [context["field"]])
        return ApiError(400, f"{where}: {context['reason']}", param=where, code=context["code"])
    field = path[0] if path else None
    same = [error for error in errors if [part for part in error["loc"] if part != "body"][:1] == path[:1]]
    reasons = dict.fromkeys(str(error["msg"]) for error in same)
    where = _spell([part for part in path if not _is_type(part)]) if len(same) == 1 else str(field)
    if field is None:
        return ApiError(400, "the body must be a JSON object, sent with content-type: application/json")
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return ApiError(400, f"{where}: {'; or '.join(reasons)}", param=where, code=code)


def field_of(message: str, fields: Collection[str]) -> str | None:
    """The field a message of this package begins with, if it does."""
    first = message.split(maxsplit=1)[0].rstrip(":") if message else ""
    return first if first in fields else None


def _is_type(part: object) -> bool:
    """Members of a union appear in pydantic's locations as types: `str`, `list[str]`, `function-after[…]`, a class."""
    return isinstance(part, str) and (not part.isidentifier() or part in ("str", "int") or part[:1].isupper())


def _spell(path: Sequence[object]) -> str:
    """messages[0].content from its parts."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
