"""Client: streamed requests to one server, each with its times.

Owns the HTTP and the events of a stream. Never decides when a request is sent.
"""

import json
from collections.abc import AsyncIterator, Mapping
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

import aiohttp
from nv_engine.values import shown

from nv_api.bench.load import CHAT, ROUTES, Load
from nv_api.bench.outcome import Outcome
from nv_api.bench.prompts import Prompt

FAILURES = (aiohttp.ClientError, OSError, ValueError)
BUFFER_BYTES = 1 << 20
MAX_SHOWN = 500
"""Characters of a server's error."""


class ServedModel(NamedTuple):
    """A model of a server."""

    name: str
    root: str
    """The folder or hub name that it was loaded from, where the server returns it."""


def open_session(load: Load, headers: Mapping[str, str] | None = None) -> aiohttp.ClientSession:
    """Open a session of as many connections as a load needs; its headers go with every request."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=load.request_timeout),
        headers=headers,
        read_bufsize=BUFFER_BYTES,
        trust_env=True,
    )


class Client:
    """Sends prompts to one route of a server.

    Args:
        session: of `open_session`.
        base_url: of the server, such as "http://127.0.0.1:8000".
        load: what is asked of each request.
        endpoint: the route; None: that of the load's backend.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        base_url: str,
        load: Load,
        endpoint: str | None = None,
    ) -> None:
        self._session = session
        self._root = base_url.rstrip("/").removesuffix("/v1")
        self._url = self._root + (endpoint or ROUTES[load.backend])
        self._load = load

    async def first_model(self) -> ServedModel:
        """The first model of /v1/models.

        Raises:
            ConnectionError: nothing answers there, or not in time.
            ValueError: the answer is not a list of models.
        """
        url = f"{self._root}/v1/models"
        try:
            async with self._session.get(url) as response:
                text = await response.text()
        except TimeoutError:
            raise ConnectionError(f"{url} gave {self._too_late}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionError(
                f"nothing answers at {self._root} ({error}): start a server there, or name "
                "another with --base-url"
            ) from None
        try:
            first = json.loads(text)["data"][0]
            return ServedModel(first["id"], first.get("root") or first["id"])
        except (ValueError, LookupError, TypeError):
            raise ValueError(
                f"{url} returned status {response.status} and {shown(text)}: name the model with "
                "--model and its tokenizer with --tokenizer, and the key with --api-key"
            ) from None

    async def send(self, prompt: Prompt, model: str) -> Outcome:
        """Send one request and read its answer; a failure is an outcome too."""
        sent_at = perf_counter()
        reading = _Reading(sent_at)
        try:
            async with self._session.post(self._url, json=self._body(prompt, model)) as response:
                if response.status != 200:
                    text = (await response.text())[:MAX_SHOWN]
                    return Outcome(error=f"status {response.status}: {text}")
                async for now, data in _events(response):
                    reading.take(now, data)
        except TimeoutError:  # an OSError without a text
            return Outcome(error=self._too_late)
        except FAILURES as error:
            return Outcome(error=f"{type(error).__name__}: {error}")
        return reading.outcome(prompt)

    @property
    def _too_late(self) -> str:
        """The reason for a request that took longer than its limit."""
        return (
            f"no whole answer within request_timeout, {self._load.request_timeout:g} s: give a "
            "longer --request-timeout"
        )

    def _body(self, prompt: Prompt, model: str) -> dict[str, Any]:
        load = self._load
        is_chat = load.backend == CHAT
        fields: dict[str, Any] = {
            "model": model,
            "messages" if is_chat else "prompt": prompt.content,
            "max_completion_tokens" if is_chat else "max_tokens": prompt.num_output,
            "temperature": load.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if load.ignore_eos:
            fields["ignore_eos"] = True
        return fields | load.extra_body


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[float, Any]]:
    """The data of each event, with the time at which it came; None is the end."""
    held = b""
    async for chunk in response.content.iter_any():
        now = perf_counter()
        *lines, held = (held + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                yield now, None if data == b"[DONE]" else json.loads(data)


class _Reading:
    """One stream, as far as it has come."""

    def __init__(self, sent_at: float) -> None:
        self._sent_at = sent_at
        self._times: list[float] = []
        self._texts: list[str] = []
        self._usage: Mapping[str, Any] = {}
        self._is_over = False

    def take(self, now: float, data: Any) -> None:  # noqa: ANN401  # JSON of any server
        """Read an event.

        Raises:
            ValueError: it is the server's error, or not an event of OpenAI's.
        """
        if data is None:
            self._is_over = True
            return
        if not isinstance(data, dict) or data.get("error"):
            raise ValueError(f"the stream had {shown(data)}")
        self._usage = data.get("usage") or self._usage
        for choice in data.get("choices") or ():
            if text := _text(choice):
                self._times.append(now)
                self._texts.append(text)

    def outcome(self, prompt: Prompt) -> Outcome:
        """Of the whole stream. Without usage, an event counts as a token."""
        if not self._is_over:
            return Outcome(error="the stream broke off before [DONE]")
        if not self._times:
            return Outcome(error="the answer has no text")
        times, content = self._times, prompt.content
        known = len(content) if content and isinstance(content[0], int) else 0
        return Outcome(
            num_prompt=self._usage.get("prompt_tokens") or known,
            num_output=self._usage.get("completion_tokens") or len(times),
            ttft=times[0] - self._sent_at,
            itls=tuple(late - early for early, late in pairwise(times)),
            e2el=times[-1] - self._sent_at,
            text="".join(self._texts),
        )


def _text(choice: Mapping[str, Any]) -> str:
    """The text of a choice, a thought's too."""
    if "delta" not in choice:
        return choice.get("text") or ""
    delta = choice["delta"] or {}
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
