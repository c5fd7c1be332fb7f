"""The health port: two pages in plaintext for probes that cannot show a certificate, and nothing else.

/livez is OK if this process's ports answer, /readyz if also the coordinator knows this shard. Kubernetes' probes look
only at the status code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ps_runtime.web import serve

LIVE, READY = "/livez", "/readyz"


class HealthPort:
    """Serves both pages until it is stopped.

    is_known:  returns whether the coordinator knows this server
    trouble:   returns why it does not serve; empty: it does
    unknown:   the text for probes while `is_known` is False
    port:      the port; 0 lets the system choose. Raises InvalidRequest if it cannot be bound
    is_ending: set it when this server ends: from then on it is not ready
    """

    def __init__(
        self,
        host: str,
        port: int,
        is_known: Callable[[], bool],
        trouble: Callable[[], str] = str,
        unknown: str = "the coordinator does not know this shard yet",
    ) -> None:
        self.is_ending = False
        self._is_known, self._trouble, self._unknown = is_known, trouble, unknown
        self.port, self.stop = serve(host, port, self._app, "health", "--health-port")

    def _app(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method = environ["REQUEST_METHOD"]
        status, text = self._answer(method, environ.get("PATH_INFO", ""))
        body = f"{text}\n".encode()
        start_response(status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))])
        return [b""] if method == "HEAD" else [body]

    def _answer(self, method: str, path: str) -> tuple[str, str]:
        if path not in (LIVE, READY):
            return "404 Not Found", f"here are {LIVE} and {READY}"
        if method not in ("GET", "HEAD"):
            return "405 Method Not Allowed", "health is only to be read"
        reason = (self._why_not_ready() if path == READY else None) or self._trouble() or None
        return ("200 OK", "ok") if reason is None else ("503 Service Unavailable", reason)

    def _why_not_ready(self) -> str | None:
        if self.is_ending:
            return "this server is ending"
        return None if self._is_known() else self._unknown
