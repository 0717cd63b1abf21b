"""Bodies: the bytes of a request, read up to a limit and parsed into a model.

Owns what is JSON, its depth, and the sentences about fields that are wrong.
"""

import asyncio
import json
import re
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import orjson
from nv_engine.values import shown
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from nv_api.server.errors import INVALID, ApiError, invalid

Model = TypeVar("Model", bound=BaseModel)
Made = TypeVar("Made")

LONG_BYTES = 128 << 10
"""A body of this length takes three milliseconds, if it is token ids."""

MAX_DEPTH = 100
"""Most brackets that may be open at one point of a body."""
TO_ZEROS, ZEROS = bytes.maketrans(b"123456789", b"0" * 9), b"0" * 20
"""A body with an integer over 64 bits has so many digits in a row; to look for them so takes a
tenth of a regular expression's time."""
NESTING = frozenset({dict, list})
_JSON = re.compile(r"application/(?:[\w.-]+\+)?json")


async def read_body(request: Request, model: type[Model], max_bytes: int) -> Model:
    """The body of a request, checked; raises as `made_of_body`."""
    return await made_of_body(request, model, max_bytes, lambda asked: asked)


async def made_of_body(
    request: Request, model: type[Model], max_bytes: int, make: Callable[[Model], Made]
) -> Made:
    """The result of `make` for the body of a request; of a long one it is made in a thread.

    Raises:
        ApiError: 413, 415, or 400 that names the field; or as `make`.
    """
    _check_type(request)
    content = await _read(request, max_bytes)
    if len(content) < LONG_BYTES:
        return make(checked(model, _parsed(content)))
    return await asyncio.to_thread(lambda: make(checked(model, _parsed(content))))


def _check_type(request: Request) -> None:
    media = request.headers.get("content-type", "").split(";")[0].strip().lower()
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if not _JSON.fullmatch(media):
        raise ApiError(
            415,
            INVALID,
            f"the content-type is {shown(media)}: it must be application/json",
            code="unsupported_media_type",
        )
    if coding != "identity":
        raise ApiError(
            415,
            INVALID,
            f"the content-encoding is {shown(coding)}: send the body as it is",
            code="unsupported_media_type",
        )


async def _read(request: Request, max_bytes: int) -> bytes:
    """The bytes; reading stops where there are too many."""
    length = request.headers.get("content-length", "")
    too_large = ApiError(
        413,
        INVALID,
        f"the body is larger than {max_bytes} bytes: send a smaller one",
        code="body_too_large",
    )
    if length.isdecimal() and int(length) > max_bytes:
        raise too_large
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise too_large
        parts.append(part)
    return b"".join(parts)


def _parsed(content: bytes) -> dict[str, Any]:
    """The JSON object of a body."""
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise invalid(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise invalid(f"the body is {shown(value)}: it must be a JSON object", code="invalid_json")
    if content.count(b"[") + content.count(b"{") > MAX_DEPTH:
        _check_depth(value)
    if b"\\u0000" in content:
        _check_nulls(value, "")
    if ZEROS in content.translate(TO_ZEROS):
        exact: dict[str, Any] = _exact(value, json.loads(content))
        return exact
    return value


def _exact(rough: Any, whole: Any) -> Any:  # noqa: ANN401
    """A body whose integers over 64 bits, which orjson rounds, are exact in fields and their lists.

    What is nested in objects of the client's, such as schemas, stays as orjson can write it again.
    """
    if isinstance(rough, dict):
        return {
            name: member if isinstance(member, dict) else _exact(member, whole[name])
            for name, member in rough.items()
        }
    if isinstance(rough, list):
        return [
            each if isinstance(each, dict) else _exact(each, other)
            for each, other in zip(rough, whole, strict=True)
        ]
    return whole if isinstance(rough, float) else rough


def _check_depth(value: dict[str, Any]) -> None:
    """Look at one level of brackets after the other; the error names the field."""
    for name, member in value.items():
        level = [member]
        for _ in range(MAX_DEPTH):
            level = [child for parent in level for child in _children(parent)]
            if not level:
                break
        else:
            raise invalid(
                f"{shown(name)} is nested more than {MAX_DEPTH} levels deep: send a flatter one",
                name,
                "invalid_json",
            )


def _children(value: object) -> list[Any]:
    """The members of an object or a list that may have members themselves."""
    if not isinstance(value, dict | list):
        return []
    members: Collection[object] = value.values() if isinstance(value, dict) else value
    if NESTING.isdisjoint(map(type, members)):  # nearly always, and a list is long
        return []
    return [each for each in members if type(each) in NESTING]


def _check_nulls(value: object, place: str) -> None:
    """Refuse null characters, which some tokenizers and templates end a text at."""
    if isinstance(value, str) and "\0" in value:
        raise invalid(
            f"{place} has a null character at position {value.index(chr(0))}: remove it", place
        )
    if isinstance(value, dict):
        for name, member in value.items():
            _check_nulls(name, f"{place}.{name}" if place else "the body")
            _check_nulls(member, f"{place}.{name}" if place else name)
    if isinstance(value, list):
        for index, member in enumerate(value):
            if isinstance(member, str | list | dict):
                _check_nulls(member, f"{place}.{index}")


def checked(model: type[Model], value: dict[str, Any]) -> Model:
    """A JSON object as a model.

    Raises:
        ApiError: 400 that names the first field that is wrong.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _sentence(error) from None


def _sentence(error: ValidationError) -> ApiError:
    """The first of pydantic's errors as ours."""
    first = error.errors(include_url=False, include_context=False)[0]
    param = ".".join(map(str, first["loc"])) or None
    if first["type"] == "missing":
        return invalid(f"{param} is missing: give it", param)
    reason = first["msg"].replace("Input should be", "it must be").removeprefix("Value error, ")
    if first["type"] == "value_error":
        return invalid(reason, param)
    return invalid(f"{param} is {shown(first['input'])}: {reason}", param)
