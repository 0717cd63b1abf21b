"""PooledWhole: the response to a request that pools.

Owns how results become JSON: one after the other in a thread, as a long list of numbers would hold
up the event loop.
"""

import asyncio
from base64 import b64encode
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from nv_api.outputs import CompletionOutput
from nv_api.pooled_request import PooledRequest
from nv_api.pooling_outputs import PooledValues
from nv_api.request import Request
from nv_api.server.generation import Usage

Form = Callable[[Sequence[PooledValues]], dict[str, Any]]
"""Makes a response, but for its usage, of the prompts' results."""


class PooledWhole:
    """One response.

    Args:
        form: makes it.
        requests: the prompts, whose results are there when `body` is called.
    """

    def __init__(self, form: Form, requests: Sequence[Request]) -> None:
        self._form = form
        self._requests = requests

    def push(self, number: int, delta: CompletionOutput) -> None:
        """Do nothing: a result comes whole."""

    async def body(self, usage: Usage) -> bytes:
        """The response as JSON."""
        return await asyncio.to_thread(self._body, usage)

    def _body(self, usage: Usage) -> bytes:
        results = []
        for request in self._requests:
            assert isinstance(request, PooledRequest)
            results.append(request.values)
        return orjson.dumps({**self._form(results), "usage": pooled_usage(usage)})


def pooled_usage(usage: Usage) -> dict[str, object]:
    """As a response has it: nothing is generated."""
    fields = usage.fields
    del fields["completion_tokens"], fields["completion_tokens_details"]
    return fields


def json_numbers(values: PooledValues, encoding: str | None) -> Any:  # noqa: ANN401
    """One result as JSON has it: [width], or [tokens][width]; in base64 a text.

    Args:
        values: the result.
        encoding: "base64", or anything else for numbers.
    """
    if encoding == "base64":
        return b64encode(values.content).decode()
    rows = [orjson.Fragment(orjson.dumps(row)) for row in values.lists()]
    return rows if values.is_of_tokens else rows[0]
