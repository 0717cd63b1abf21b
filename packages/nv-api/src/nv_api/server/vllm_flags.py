"""Flags of `vllm serve` that `nv serve` does not have.

Owns the tables: flags that make no difference here, and what there is in place of others.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from nv_engine.names import ForeignNames

NO_DIFFERENCE = frozenset(
    {
        "disable_frontend_multiprocessing",
        "disable_uvicorn_access_log",
        "enable_auto_tool_choice",
        "enable_prompt_tokens_details",
        "enable_request_id_headers",
        "enable_server_load_tracking",
        "h11_max_header_count",
        "h11_max_incomplete_event_size",
        "max_log_len",
        "uvicorn_log_level",
    }
)
UNBUILT: dict[str, tuple[Any, ...]] = {
    "allow_credentials": (False,),
    "allowed_headers": ("*",),
    "allowed_methods": ("*", "GET", "POST"),
    "api_server_count": (1,),
    "disable_fastapi_docs": (False,),
    "enable_force_include_usage": (False,),
    "enable_log_requests": (False,),
    "middleware": (),
    "response_role": ("assistant",),
    "tool_parser_plugin": ("",),
}
"""The values, besides none and lists of such values, that ask for nothing."""
INSTEAD = {
    "allow_credentials": "web pages send the key in a header",
    "allowed_headers": "every header is allowed to pages of --allowed-origins",
    "allowed_methods": "GET and POST are allowed to pages of --allowed-origins",
    "api_server_count": "one process serves the engine: start one nv serve per engine",
    "disable_fastapi_docs": "the schema is always at /openapi.json: block it in the proxy",
    "enable_force_include_usage": "send stream_options={'include_usage': true}",
    "enable_log_requests": "use --log-requests ids",
    "middleware": "mount nv_api.server.make_app in an app of your own",
    "response_role": "answers have the role assistant",
    "tool_parser_plugin": "a parser is a file in nv_api/said and a line in its registry",
}
FLAGS = ForeignNames(no_difference=NO_DIFFERENCE, unbuilt=UNBUILT, instead=INSTEAD)


def engine_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are the engine's; a warning names the flags without effect.

    Raises:
        NotImplementedError: a flag that asks for what is not built.
    """
    flags = NO_DIFFERENCE | UNBUILT.keys()
    own = {name: value for name, value in given.items() if name not in flags}
    if ignored := FLAGS.ignored("nv serve", given, own):
        warnings.warn(f"accepted without effect: {', '.join(ignored)}", stacklevel=2)
    return own
