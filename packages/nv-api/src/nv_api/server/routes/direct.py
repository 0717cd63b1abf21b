"""DirectRoute: a route whose function gets the request and returns the response.

Owns the short way to the function. FastAPI's own reads parameters, dependencies and a body, of
which these routes have none: the functions read their bodies themselves.
"""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response


class DirectRoute(APIRoute):
    """A route of `async def function(request: Request) -> Response`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The function itself."""
        return self.endpoint
