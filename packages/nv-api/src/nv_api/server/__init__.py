"""`nv serve`: OpenAI's routes over an `AsyncLLM`.

Needs the extra `server` (fastapi, uvicorn). Never starts an engine: `AsyncLLM` does.
"""

from nv_api.server.app import make_app
from nv_api.server.options import ServeOptions

__all__ = ["ServeOptions", "make_app"]
