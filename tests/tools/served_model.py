"""What tests ask examples/serve.py over HTTP, and the small model that it serves to them."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

SHAPE = {"layers": 1, "heads": 2, "width": 16, "block": 8}
TEXT = "import this; def text(self): return self.text"


def ask(address: str, path: str, body: Any = None) -> tuple[int, int, dict[str, Any]]:
    """The status, the version in the header, and what is answered."""
    there = urlsplit(address)
    connection = http.client.HTTPConnection(there.hostname or "", there.port, timeout=60)
    try:
        text = None if body is None else body if isinstance(body, str) else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, text, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, int(answer.headers["x-model-version"]), json.loads(answer.read())
    finally:
        connection.close()
