"""schemathesis: the server answers as /openapi.json declares, and never with a 5xx."""

import re

MORE_OPTIONS = ["--max-model-len=128"]
"""A request that gives no length has an answer as long as the context."""


def test_openapi(schemathesis):
    found = schemathesis()
    assert re.search(r"Tested: 25\b", found), found
