"""Flags of `vllm serve` that `nv serve` does not have.

Owns the two lists: those that make no difference here, and what there is in place of others.
"""

import warnings
from collections.abc import Mapping
from typing import Any

NO_DIFFERENCE = frozenset(
    {
        "disable_fastapi_docs",
        "disable_frontend_multiprocessing",
        "disable_uvicorn_access_log",
        "enable_auto_tool_choice",
        "enable_force_include_usage",
        "enable_log_requests",
        "enable_prompt_tokens_details",
        "enable_request_id_headers",
        "enable_server_load_tracking",
        "h11_max_header_count",
        "h11_max_incomplete_event_size",
        "max_log_len",
        "uvicorn_log_level",
    }
)
INSTEAD = {
    "allow_credentials": "web pages send the key in a header",
    "allowed_headers": "every header is allowed to pages of --allowed-origins",
    "allowed_methods": "GET and POST are allowed to pages of --allowed-origins",
    "api_server_count": "one process serves the engine: start one nv serve per engine",
    "lora_modules": "adapters are not there: merge it into the model's weights",
    "middleware": "mount nv_api.server.make_app in an app of your own",
    "response_role": "answers have the role assistant",
    "tool_parser_plugin": "a parser is a file in nv_api/said and a line in its registry",
}


def engine_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are the engine's; a warning names those that make no difference.

    Raises:
        NotImplementedError: a flag that would make one.
    """
    for name in sorted(given.keys() & INSTEAD.keys()):
        raise NotImplementedError(f"--{name.replace('_', '-')} is not built: {INSTEAD[name]}")
    if ignored := sorted(given.keys() & NO_DIFFERENCE):
        warnings.warn(f"accepted without effect: {', '.join(ignored)}", stacklevel=2)
    return {name: value for name, value in given.items() if name not in NO_DIFFERENCE}
