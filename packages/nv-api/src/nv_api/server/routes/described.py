"""Described: how a route describes itself in /openapi.json.

Owns the errors that every route may answer with. Bodies are read by `read_body`, so FastAPI does
not see their models: they are named here.
"""

from typing import Any

from pydantic import BaseModel

from nv_api.server.protocol.errors import ErrorEnvelope

ERRORS = {
    400: "The request is wrong.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "The queue is full.",
    500: "The server failed.",
    503: "The model is loading, the server is shutting down, or the engine is lost.",
}
OF_READS = (401, 500, 503)
"""Errors of routes without a body."""


def errors(
    *statuses: int, envelope: type[BaseModel] = ErrorEnvelope
) -> dict[int | str, dict[str, Any]]:
    """The errors of a route."""
    return {
        status: {"model": envelope, "description": ERRORS[status]} for status in statuses or ERRORS
    }


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The body of a route; its model is among the components (`app.py`)."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def json_of(text: str, model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """A response that is a JSON object.

    Args:
        text: what it is.
        model: of the object.
    """
    return {200: {"model": model, "description": text}}


DONE_DATA = {"const": "[DONE]"}
"""The data of the last event of OpenAI's streams."""


def data_of(*models: type[BaseModel]) -> dict[str, Any]:
    """The data of an event: the JSON of one of some models."""
    schemas = [{"$ref": f"#/components/schemas/{model.__name__}"} for model in models]
    return {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": schemas},
    }


def stream_of(
    text: str, model: type[BaseModel], *data: dict[str, Any]
) -> dict[int | str, dict[str, Any]]:
    """A response that is a JSON object, or a stream of events.

    Args:
        text: what it is.
        model: of the object.
        *data: what the data of an event may be.
    """
    item = {
        "type": "object",
        "required": ["data"],
        "properties": {"event": {"type": "string"}, "data": {"anyOf": [*data]}},
    }
    return {
        200: {
            "model": model,
            "description": text,
            # As FastAPI describes a stream. A `schema` would be read as that of one event.
            "content": {"text/event-stream": {"itemSchema": item}},
        }
    }
