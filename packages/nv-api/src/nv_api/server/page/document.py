"""Document: an HTML file, and the content security policy that lets exactly it run.

Owns the policy. Never changes the file.
"""

import re
from base64 import b64encode
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files

_INLINE = re.compile(r"<(script|style)\b[^>]*>(.*?)</\1>", re.DOTALL)
_FIXED = (
    "default-src 'none'",
    "connect-src 'self'",
    "img-src data:",  # the icon
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",  # a text never becomes HTML or a script
    "trusted-types 'none'",
)


@dataclass(frozen=True)
class Document:
    """An HTML document.

    Args:
        html: all of it; its scripts and styles are inline.
    """

    html: str

    @classmethod
    def page(cls) -> "Document":
        """The page at `/`."""
        return cls(files(__package__).joinpath("index.html").read_text(encoding="utf-8"))

    @property
    def policy(self) -> str:
        """The header Content-Security-Policy: scripts and styles by their hashes, no others."""
        hashes: dict[str, list[str]] = {"script": [], "style": []}
        for kind, text in _INLINE.findall(self.html):
            digest = b64encode(sha256(text.encode()).digest()).decode()
            hashes[kind].append(f"'sha256-{digest}'")
        own = [f"{kind}-src {' '.join(found)}" for kind, found in hashes.items() if found]
        return "; ".join([*_FIXED, *own])

    @property
    def headers(self) -> dict[str, str]:
        """Every header of the response but its type and length."""
        return {
            "content-security-policy": self.policy,
            "cross-origin-opener-policy": "same-origin",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
            "cache-control": "no-cache",
        }
