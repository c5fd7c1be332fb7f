"""ASGI middleware for an engine's HTTP server: every answer says its version, and there is none before the first.

An engine that was started again has the weights of its checkpoint, not those of training. It must not answer with them
as if they were new.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

HEADER = b"x-model-version"
# The routes by which vLLM is given weights.
_START, _UPDATE, _FINISH = "/start_weight_update", "/update_weights", "/finish_weight_update"
_NOT_DONE = (401, 403, 404, 405)  # answers with which the engine did nothing


class TellsVersion:
    """ASGI middleware for `vllm serve --middleware ps_torch.engines.answers.TellsVersion`.

    It sees the requests that give the engine weights: a POST to /start_weight_update takes the engine's version away,
    one to /update_weights names the next, and one to /finish_weight_update has the engine use it. From then on every
    answer has the header `x-model-version`: its weights contain at least so many updates. Before, and when any of these
    requests has failed, requests below /v1 get 503.

    Args:
        app: The engine's own application.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._named: int | None = None  # by the last request to /update_weights
        self._loaded: int | None = None
        self._under_way = 0  # requests that give the engine weights
        self._given = 0  # how many of these have come to something, so that two at once are seen

    @property
    def version(self) -> int | None:
        """The version of the engine's weights; None: they are of no version, or are being replaced."""
        return None if self._under_way else self._loaded

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Handles a request."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif path in (_START, _UPDATE, _FINISH) and scope.get("method") == "POST":
            await self._watch(scope, receive, send, path)
        elif self.version is None and path.startswith("/v1"):
            await _refuse(send)
        else:
            await self._app(scope, receive, _telling(send, self.version))

    async def _watch(self, scope: MutableMapping[str, Any], receive: Receive, send: Send, path: str) -> None:
        """Passes on a request that gives the engine weights, and records its result."""
        body, status, given, is_over = bytearray(), 500, self._given, False

        async def seen() -> Message:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        async def told(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                over()  # before the caller sees the answer, and sends its next request
            await send(message)

        def over() -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                self._under_way -= 1
                self._note(path, _version(body) if path == _UPDATE else self._named, status, given)

        self._under_way += 1
        try:
            await self._app(scope, seen, told)
        except BaseException:
            status = 500
            raise
        finally:
            over()

    def _note(self, path: str, version: int | None, status: int, given: int) -> None:
        """Records the result of a request. given: the number of such requests that had succeeded when it began"""
        if status in _NOT_DONE:
            return
        # After two updates at once, it is unknown which one the engine has loaded last.
        is_sure = status < 400 and given == self._given
        self._given += 1
        self._named = version if is_sure and path == _UPDATE else None
        self._loaded = version if is_sure and path == _FINISH else None


def _version(body: bytes | bytearray) -> int | None:
    """Returns the version that a request to /update_weights names; None: it names none."""
    try:
        return int(json.loads(body)["update_info"]["version"])
    except (ValueError, KeyError, TypeError):
        return None


def _telling(send: Send, version: int | None) -> Send:
    """Returns a `send` that adds the version to an answer's headers."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start" and version is not None:
            message["headers"] = [*message.get("headers", ()), (HEADER, str(version).encode())]
        await send(message)

    return sending


async def _refuse(send: Send) -> None:
    text = b'{"error": "the engine has not been given weights of training yet"}'
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": text})
