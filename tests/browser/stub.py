"""A stub of the routes that the page calls: answers are scripted by the last message's text.

Run it as a program: it prints its port, and serves until its standard input is closed.
"""

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from nv_api.server.page.document import Document

KEY = "sk-right"
DEFAULTS = {
    "models": ["demo/small", "demo/alias"],
    "max_model_len": 2048,
    "max_logprobs": 20,
    "tasks": [],
    "routes": [],
    "defaults": {
        "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "repetition_penalty": 1.1, "max_tokens": None, "seed": None,
        "stop": [],
    },
}  # fmt: skip
METRICS = """# HELP vllm:num_requests_running Sequences that run.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="demo/small"} 3.0
vllm:num_requests_waiting{engine="0",model_name="demo/small"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="demo/small"} 0.37
"""
RICH = """## Rivers and their lengths

The **longest** are *easy*: see [a list](https://example.org/rivers), or `length_of("Nile")`.

| River | Continent | Length, km |
|:------|:----------|-----------:|
| Nile | Africa | 6,650 |
| Amazon | South America | 6,400 |
| Yangtze | Asia | 6,300 |

### How to sort them

1. Read the table.
2. Sort it by its last column:
   - the longest first,
   - ties by name.
3. Print it.

```python
def longest(rivers: dict[str, int], count: int = 3) -> list[str]:
    \"\"\"Return the names of the longest rivers.\"\"\"
    ranked = sorted(rivers, key=lambda name: (-rivers[name], name))
    return ranked[:count]  # this line is wider than a narrow screen
```

> Lengths depend on where a river is taken to begin.
"""
HOSTILE = """<img src=x onerror="window.hacked = 1"> <script>window.hacked = 2</script>

[x](javascript:window.hacked=3) [y](JaVaScRiPt:window.hacked=4)
[z](data:text/html,<script>window.hacked=5</script>)

<a href="javascript:window.hacked=6" onclick="window.hacked=7">link</a>

| <svg onload=window.hacked=8> | b |
|---|---|
| <iframe srcdoc="<script>parent.hacked=9</script>"> | [q](vbscript:x) |

```"><script>window.hacked=10</script>
</code></pre><img src=x onerror=window.hacked=11>
```

# <img src=x onerror=window.hacked=12>
"""
THOUGHTS = "The user greets me. I should greet back, **briefly**."
SPACED = "one two three four five six seven eight nine ten " * 4


class Stub(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    document = Document.page()
    requests: list = []  # noqa: RUF012  # bodies of chats, newest last
    state: dict = {}  # noqa: RUF012  # set by POST /state: needs_key, is_loading, failures, defaults

    def do_GET(self) -> None:
        if self.path == "/":
            self._send(
                200, self.document.html.encode(), "text/html; charset=utf-8", self.document.headers
            )
        elif self.path == "/requests":
            self._send(200, json.dumps(self.requests).encode())
        elif self._is_refused():
            pass
        elif self.path == "/page/defaults":
            self._send(200, json.dumps(DEFAULTS | self.state.get("defaults", {})).encode())
        elif self.path == "/metrics":
            self._send(200, METRICS.encode(), "text/plain; version=1.0.0; charset=utf-8")
        else:
            self._error(404, f"there is no route {self.path}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/state":
            self.state.clear()
            self.state.update(body)
            self._send(200, b"{}")
        elif not self._is_refused():
            self.requests.append(body)
            self._chat(body)

    def _chat(self, body: dict) -> None:
        asked = body["messages"][-1]["content"]
        if asked.startswith("status "):
            number, _, code = asked.removeprefix("status ").partition(" ")
            self.state.setdefault("failures", 1)
            if self.state["failures"] > 0:
                self.state["failures"] -= 1
                self._error(int(number), f"the stub answers {number}", code)
                return
        if asked == "cut":
            self._begin()
            self._event({"delta": {"content": "This answer is"}})
            time.sleep(0.2)  # what is not read yet is lost with the connection
            self.close_connection = True
            self.connection.shutdown(2)
            return
        self._begin()
        for delta, pause in self._script(asked, bool(body.get("logprobs"))):
            if not self._event(delta):
                return
            time.sleep(pause)
        if asked == "late error":
            self._write(
                b'data: {"error": {"message": "out of memory", "type": "server_error"}}\n\n'
            )
        else:
            self._event({"delta": {}, "finish_reason": "length" if asked == "long" else "stop"})
        self._write(b"data: [DONE]\n\n")
        self._write(b"")

    def _script(self, asked: str, has_logprobs: bool):
        """Deltas, and the pause after each in seconds."""
        text, pause, size = f"You wrote: {asked}", 0.005, 4
        if asked == "think":
            for at in range(0, len(THOUGHTS), 6):
                yield {"delta": {"reasoning_content": THOUGHTS[at : at + 6]}}, 0.005
            text = "Hello!"
        if asked == "slow":
            text, pause = SPACED * 20, 0.03
        if asked == "rich":
            text = RICH
        if asked == "hostile":
            text, size = HOSTILE, 7
        if asked == "long":
            text, pause, size = "A paragraph of the long answer.\n\n- item\n\n" * 4000, 0, 400
        if asked == "late error":
            text = "So far so good"
        for at in range(0, len(text), size):
            piece = text[at : at + size]
            delta = {"delta": {"content": piece}}
            if has_logprobs:
                delta["logprobs"] = {"content": [self._entry(piece, at)]}
            yield delta, pause

    @staticmethod
    def _entry(piece: str, at: int) -> dict:
        def entry(token: str, logprob: float) -> dict:
            return {"token": token, "logprob": logprob, "bytes": list(token.encode())}

        logprob = (-0.01, -0.4, -1.2, -2.5, -5.0)[at // 4 % 5]
        others = [entry(piece, logprob), entry(" the", -1.9), entry("<b>", -3.2), entry("\n", -4.0)]
        return {
            **entry(piece, logprob),
            "top_logprobs": sorted(others, key=lambda e: -e["logprob"]),
        }

    def _is_refused(self) -> bool:
        if self.state.get("needs_key") and self.headers["authorization"] != f"Bearer {KEY}":
            self._error(401, "the request has no API key", "invalid_api_key")
        elif self.state.get("is_loading"):
            self._error(503, "the model is loading: try again later", "loading")
        else:
            return False
        return True

    def _error(self, status: int, message: str, code: str = "") -> None:
        body = json.dumps({"error": {"message": message, "type": "", "param": None, "code": code}})
        self._send(status, body.encode(), headers={"retry-after": "3"})

    def _send(
        self, status: int, body: bytes, kind: str = "application/json", headers: dict | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {
            "content-type": kind,
            "content-length": str(len(body)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _begin(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self._num_tokens = 0
        self._event({"delta": {"role": "assistant", "content": ""}})

    def _event(self, choice: dict) -> bool:
        """Write an event; False: the client has left."""
        if choice["delta"].get("content") or choice["delta"].get("reasoning_content"):
            self._num_tokens += 1
        usage = {"prompt_tokens": 24, "completion_tokens": self._num_tokens,
                 "prompt_tokens_details": {"cached_tokens": 16}}  # fmt: skip
        choice = {"index": 0, "finish_reason": None, **choice}
        return self._write(
            b"data: " + json.dumps({"choices": [choice], "usage": usage}).encode() + b"\n\n"
        )

    def _write(self, data: bytes) -> bool:
        try:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()
        except OSError:
            self.requests.append("the client has left")
            return False
        return True

    def log_message(self, *arguments: object) -> None:
        pass


def main() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
