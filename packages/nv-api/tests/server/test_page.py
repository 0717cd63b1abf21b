"""The page at `/`: one file that fetches nothing from elsewhere, with a strict policy."""

import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser

import pytest
from nv_api.server.page.document import Document
from nv_engine.pooling_params import TASKS

MAX_BYTES = 100_000
HTML = Document.page().html
FORBIDDEN = (
    "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function",
    "DOMParser", "srcdoc", "setAttribute(\"style", "setAttribute(\"on", "localStorage",
    "createContextualFragment", "importScripts", "import(",
)  # fmt: skip


class Parts(HTMLParser):
    """The inline parts of a page, and every attribute."""

    def __init__(self):
        super().__init__()
        self.open, self.attributes, self.parts, self.tags = None, [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        self.open = tag if tag in ("script", "style") else None

    def handle_endtag(self, tag):
        self.open = None

    def handle_data(self, data):
        if self.open is not None:
            self.parts.append((self.open, data))


@pytest.fixture(scope="module")
def parts():
    parser = Parts()
    parser.feed(HTML)
    parser.close()
    return parser


def policy_of(text):
    return {name: rest for name, *rest in (each.split() for each in text.split("; "))}


def test_the_file_is_small():
    assert len(HTML.encode()) < MAX_BYTES


def test_nothing_is_fetched_from_elsewhere(parts):
    addresses = [v for k, v in parts.attributes if k in ("src", "href", "action", "data", "srcset")]
    assert [a for a in addresses if not a.startswith(("#", "data:image/svg+xml,"))] == []
    (style,) = [text for kind, text in parts.parts if kind == "style"]
    assert "url(" not in style
    assert "@import" not in style
    (script,) = [text for kind, text in parts.parts if kind == "script"]
    fetched = re.findall(r"""(?:\bask|\bfetch)\(["'`]([^"'`]*)""", script)
    assert set(fetched) == {"page/defaults", "metrics", "v1/chat/completions"}
    elsewhere = set(re.findall(r"https?://[\w.]+", HTML)) - {"http://www.w3.org"}  # SVG's name
    assert elsewhere == set()


@pytest.mark.parametrize("word", FORBIDDEN)
def test_no_text_becomes_html_or_a_script(word):
    assert word not in HTML


def test_nothing_is_inline_but_one_script_and_one_style(parts):
    assert sorted(kind for kind, _ in parts.parts) == ["script", "style"]
    assert [k for k, _ in parts.attributes if k == "style" or k.startswith("on")] == []
    assert not {"base", "iframe", "object", "embed", "img", "meta http-equiv"} & {*parts.tags}


def test_the_policy_has_the_hashes_of_the_file_and_nothing_unsafe(parts):
    policy = policy_of(Document.page().policy)
    for kind, text in parts.parts:
        digest = b64encode(sha256(text.encode()).digest()).decode()
        assert policy[f"{kind}-src"] == [f"'sha256-{digest}'"]
    assert policy["default-src"] == ["'none'"]
    assert policy["connect-src"] == ["'self'"]
    assert policy["require-trusted-types-for"] == ["'script'"]
    for name in "base-uri", "form-action", "frame-ancestors", "trusted-types":
        assert policy[name] == ["'none'"]
    assert "unsafe" not in Document.page().policy
    assert "*" not in Document.page().policy


def test_a_document_without_scripts_allows_none():
    policy = policy_of(Document("<p>text</p><style>p {}</style>").policy)
    assert "script-src" not in policy  # so default-src counts
    assert len(policy["style-src"]) == 1


def test_the_route_needs_no_key_and_has_its_headers(serve):
    served = serve(api_key=("secret",))
    response = served.client.get("/")
    assert response.status_code == 200
    assert response.text == HTML
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["content-security-policy"] == Document.page().policy
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["cache-control"] == "no-cache"
    assert served.client.get("/page/defaults").status_code == 401
    keyed = served.client.get("/page/defaults", headers={"authorization": "Bearer secret"})
    assert keyed.status_code == 200


def test_the_page_is_there_while_the_model_loads_and_its_defaults_are_not(serve):
    served = serve(script={"loaded": False})
    assert served.client.get("/").status_code == 200
    response = served.client.get("/page/defaults")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "loading"


def test_the_defaults_are_those_that_a_chat_gets(serve):
    recommended = {"temperature": 0.6, "top_k": 20, "stop": "END", "max_tokens": 64}
    script = {"recommended": recommended, "paused": True}
    served = serve(script=script, served_model_name=("a", "b"), max_logprobs=7)
    found = served.client.get("/page/defaults").json()
    assert found["models"] == ["a", "b"]
    assert found["max_model_len"] == 512
    assert found["max_logprobs"] == 7
    body = {"messages": [{"role": "user", "content": "ab"}], "stream": True}
    with served.client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200  # the engine has accepted it
        params = served.llm.submitted[0].params
    for name, value in found["defaults"].items():
        if name != "max_tokens":  # a chat may take the rest of the context, whatever is recommended
            assert getattr(params, name) == value or value == [params.stop], name
    assert found["defaults"]["max_tokens"] is None
    assert params.max_tokens > 64


def test_the_defaults_are_ours_if_the_checkpoint_s_are_ignored(serve):
    served = serve(script={"recommended": {"temperature": 0.6}}, generation_config="nv")
    assert served.client.get("/page/defaults").json()["defaults"]["temperature"] == 1.0


def test_a_model_that_pools_has_its_tasks_and_routes(serve, pooling):
    assert serve().client.get("/page/defaults").json()["tasks"] == []
    found = pooling("embedder")[0].client.get("/page/defaults").json()
    assert found["tasks"] == ["embed", "token_embed"]
    assert found["routes"] == ["/v1/embeddings", "/v1/score", "/v1/rerank", "/pooling"]
    named = re.search(r"const RESULTS = \{(.*?)\};", HTML, re.DOTALL)[1]
    assert {*re.findall(r"(\w+): \"", named)} == {*TASKS}


def test_the_metrics_have_the_names_that_the_page_reads(serve):
    text = serve().client.get("/metrics").text
    (pattern,) = re.findall(r"new RegExp\(`\^vllm:\$\{name\}(.*?)\$`", HTML)
    pattern = pattern.replace("\\\\", "\\")
    for name in re.findall(r'sum\("(\w+)"\)', HTML):
        assert re.search(f"^vllm:{name}{pattern}$", text, re.MULTILINE), name
