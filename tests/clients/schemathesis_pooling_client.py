"""schemathesis, for the routes of a model that pools."""

import re

MORE_OPTIONS = ["--max-model-len=128", "--runner=pooling"]
ROUTES = "embeddings|score|rerank|classify|pooling"


def test_openapi(schemathesis):
    found = schemathesis(f"--include-path-regex={ROUTES}")
    assert re.search(r"Tested: 8\b", found), found
