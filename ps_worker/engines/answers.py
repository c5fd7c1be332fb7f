"""ASGI middleware for an engine's HTTP server: every answer says its version, and there is none before the first.

An engine that was started again has the weights of its checkpoint, not those of training. It must not answer with them
as if they were new.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import ExitStack
from typing import Any

from ps_worker.engines.loaded_versions import UNLABELLED, report_socket, reported

log = logging.getLogger("ps_worker")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

HEADER, LAST_HEADER = b"x-model-version", b"x-model-version-last"
# The routes by which vLLM is given weights.
_START, _UPDATE, _FINISH = "/start_weight_update", "/update_weights", "/finish_weight_update"
_NOT_DONE = (401, 403, 404, 405)  # answers with which the engine did nothing


class TellsVersion:
    """ASGI middleware for `vllm serve --middleware ps_torch.engines.answers.TellsVersion`.

    It sees the requests that give the engine weights: a POST to /start_weight_update takes the engine's version away,
    one to /update_weights brings the next, and one to /finish_weight_update has the engine use it. From then on every
    answer has the header `x-model-version`: the version that the engine loaded, which may be later than the one that
    was asked for. Before, and when any of these requests has failed, requests below /v1 get 503.

    An answer whose request has seen an update has `x-model-version-last`, too: the version at the moment at which
    its headers are sent, or "unknown" while weights are being replaced. Its tokens may be of all versions from the
    first to the last. The headers of a stream are sent before its tokens.

    From vLLM 0.27 on the version is vLLM's own label of its weights, too, unless the request to /finish_weight_update
    names another.

    The engine's first worker tells the version, so it has to be on this host. Of several engines behind one server the
    lowest version counts.

    Args:
        app: The engine's own application.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._received: int | None = None  # by the last request to /update_weights
        self._loaded: int | None = None
        self._under_way = 0  # requests that give the engine weights
        self._given = 0  # how many of these have come to something, so that two at once are seen

    @property
    def version(self) -> int | None:
        """The version of the engine's weights; None if they are of no version, or are being replaced."""
        return None if self._under_way else self._loaded

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Handles a request."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif path == _UPDATE and scope.get("method") == "POST":
            await self._update(scope, receive, send)
        elif path == _START and scope.get("method") == "POST":
            await self._watch(scope, receive, send, path, lambda: None)
        elif path == _FINISH and scope.get("method") == "POST":
            body = await _body(receive)  # first: another update may end meanwhile
            version = None if self._under_way else self._received
            scope, receive = _replaced(scope, receive, _labelled(body, version))
            await self._watch(scope, receive, send, path, lambda: self._received)
        elif self.version is None and path.startswith("/v1"):
            await _answer(send, 503, "the engine has not been given weights of training yet")
        else:
            given = self._given
            await self._app(scope, receive, _telling(send, self.version, lambda: self._later(given)))

    async def _update(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Passes on a request to /update_weights, and in it the socket to which the engine reports what it loads."""
        request = _asked(await _body(receive))
        if request is None:
            why = 'expected {"update_info": {"version": N}}, with N from 1 on: the least updates of the weights'
            await _answer(_telling(send, self.version), 400, why)
            return
        with ExitStack() as stack:
            found = report_socket(stack)
            if found is None:
                why = "there is no folder for a socket: give the engine's server a TMPDIR that is short and writable"
                await _answer(_telling(send, self.version), 500, why)
                return
            reports, address = found
            for each in _infos(request):
                each["report"] = address
            scope, receive = _replaced(scope, receive, json.dumps(request).encode())
            await self._watch(scope, receive, send, _UPDATE, lambda: reported(reports))

    async def _watch(
        self,
        scope: MutableMapping[str, Any],
        receive: Receive,
        send: Send,
        path: str,
        version: Callable[[], int | None],
    ) -> None:
        """Passes on a request that gives the engine weights, and records its result.

        version: returns the version of these weights, once the request is answered; None if it is unknown
        """
        status, given, is_over = 500, self._given, False

        async def noted(message: Message) -> None:
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
                self._note(path, version(), status, given)

        self._under_way += 1
        try:
            await self._app(scope, receive, noted)
        except BaseException:
            status = 500
            raise
        finally:
            over()

    def _later(self, given: int) -> bytes | None:
        """Returns the version for LAST_HEADER; None if the weights are those of a moment when `_given` was `given`."""
        if given == self._given and not self._under_way:
            return None
        return b"unknown" if self.version is None else str(self.version).encode()

    def _note(self, path: str, version: int | None, status: int, given: int) -> None:
        """Records the result of a request. given: the number of such requests that had succeeded when it began"""
        if status in _NOT_DONE:
            return
        # After two updates at once, it is unknown which one the engine has loaded last.
        is_sure = status < 400 and given == self._given
        self._given += 1
        if path == _UPDATE and version is None and status < 400:
            log.warning("the engine has loaded weights of no known version: its first worker is not on this host")
        self._received = version if is_sure and path == _UPDATE else None
        self._loaded = version if is_sure and path == _FINISH else None


async def _body(receive: Receive) -> bytes:
    """Returns the whole body of a request."""
    body, has_more = bytearray(), True
    while has_more:
        message = await receive()
        body += message.get("body", b"")
        has_more = message.get("more_body", False)
    return bytes(body)


def _replaced(
    scope: MutableMapping[str, Any], receive: Receive, body: bytes
) -> tuple[MutableMapping[str, Any], Receive]:
    """Returns the request that the application gets: the original one, with this JSON body instead of its own."""
    own = (b"content-length", b"content-type")
    headers = [each for each in scope.get("headers", ()) if each[0].lower() not in own]
    headers += [(b"content-length", str(len(body)).encode()), (b"content-type", b"application/json")]
    left = [body]

    async def replayed() -> Message:
        return {"type": "http.request", "body": left.pop()} if left else await receive()

    return {**scope, "headers": headers}, replayed


def _infos(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns what a request to /update_weights has for an engine's workers: the same for all, or from vLLM 0.29 on a
    list by worker.
    """
    found = request["update_info"]
    return found if isinstance(found, list) else [found]


def _asked(body: bytes) -> dict[str, Any] | None:
    """Returns a request to /update_weights; None if it names no version. 0 would be any version, and is none here."""
    try:
        request: dict[str, Any] = json.loads(body)
        versions = [each["version"] for each in _infos(request)]
    except (ValueError, KeyError, TypeError):
        return None
    return request if versions and all(type(each) is int and each > 0 for each in versions) else None


def _labelled(body: bytes, version: int | None) -> bytes:
    """Returns the body of a request to /finish_weight_update with the version as vLLM's label, if it has no label.

    version: None: it is unknown. Without a label vLLM would keep the one of the weights before.
    """
    try:
        request = json.loads(body or b"{}")
    except ValueError:
        return body
    if not isinstance(request, dict):
        return body
    if request.get("weight_version") is None:
        request["weight_version"] = UNLABELLED if version is None else str(version)
    return json.dumps(request).encode()


def _telling(send: Send, version: int | None, later: Callable[[], bytes | None] = lambda: None) -> Send:
    """Returns a `send` that adds the version to an answer's headers.

    later: returns another version to add while the headers are sent; None if there is none
    """

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start" and version is not None:
            own, last = [(HEADER, str(version).encode())], later()
            if last is not None:
                own.append((LAST_HEADER, last))
            message["headers"] = [*message.get("headers", ()), *own]
        await send(message)

    return sending


async def _answer(send: Send, status: int, error: str) -> None:
    text = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})
