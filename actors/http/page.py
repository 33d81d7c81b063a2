"""The page at /: one static file, whose style and script are inline and named by their hashes.

    page.html -> Page.response -> GET /
It takes nothing from anywhere else and calls this server alone, which the Content-Security-Policy
makes browsers keep. It needs no key itself; its calls do.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from fastapi.responses import Response

PATH = "/"
FILE = Path(__file__).with_name("page.html")


def policy(html: str) -> str:
    """The Content-Security-Policy of a page: what is inline in it and nothing else, and calls to
    its own origin. Scripts may not put text into the page as HTML."""

    def inline(tag: str) -> str:
        found = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digests = (hashlib.sha256(text.encode()).digest() for text in found)
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

    rules = (
        "default-src 'none'",
        f"script-src {inline('script')}",
        f"style-src {inline('style')}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    return "; ".join(rules)


class Page:
    """The file as it is answered, read once."""

    def __init__(self) -> None:
        html = FILE.read_text("utf-8")
        self._html = html
        self._headers = {
            "content-security-policy": policy(html),
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        }

    async def response(self) -> Response:
        return Response(self._html, headers=self._headers, media_type="text/html; charset=utf-8")
