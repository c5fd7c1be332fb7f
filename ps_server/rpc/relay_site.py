"""A relay's HTTP site: editions as safetensors files, for callers without a client of this project.

Callers have the roles of PullEdition, and its limits: a download counts as a feed while it lasts.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from ps_frames.server import AuthContext, Metadata
from ps_protocol.errors import Forbidden, InvalidRequest, LimitExceeded, NotFound, PSError, Unauthenticated
from ps_protocol.v1 import feed_pb2
from ps_runtime.downloads import Reply, WebRequest, text_reply
from ps_server.relay.followed import FollowedJob
from ps_server.relay.kept import KeptEdition
from ps_server.relay.relayed import Relayed
from ps_server.rpc.call_limits import CallLimits, check_job

METHOD = f"/{feed_pb2.DESCRIPTOR.services_by_name['FeedService'].full_name}/PullEdition"
FIRST_SECONDS = 2.0  # the longest that a request waits for the first edition of a job
RETRY_SECONDS = 1
YEAR_SECONDS = 31_536_000
_PATH = re.compile(r"/jobs/([^/]+)/(?:latest|editions/([0-9A-Za-z-]+))\.safetensors")
_STATUS: tuple[tuple[type[PSError], str], ...] = (
    (Unauthenticated, "401 Unauthorized"),
    (Forbidden, "403 Forbidden"),
    (NotFound, "404 Not Found"),
    (InvalidRequest, "400 Bad Request"),
    (LimitExceeded, "429 Too Many Requests"),
)


class _HttpCall:
    """An HTTP request as a ServerCall, for CallLimits."""

    worker = kept = None
    request_bytes = 0
    code = ""

    def __init__(self, asked: WebRequest) -> None:
        self._asked = asked
        self._callbacks: list[Callable[[], None]] = []

    def peer(self) -> str:
        """Returns the caller's address in gRPC's form."""
        host = self._asked.host
        return f"ipv6:[{host}]:0" if ":" in host else f"ipv4:{host}:0"

    def invocation_metadata(self) -> Metadata:
        """Returns the caller's authorization header as metadata."""
        token = self._asked.headers.get("authorization")
        return () if token is None else (("authorization", token),)

    def auth_context(self) -> AuthContext:
        """Returns the names in the caller's certificate."""
        return {"x509_common_name": [name.encode() for name in self._asked.names]}

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Calls back when the request is answered."""
        self._callbacks.append(callback)
        return True

    def cancel(self) -> None:
        """Does nothing: an HTTP connection has limits of its own."""

    def receive(self) -> None:
        """Returns None: the request has no body."""

    def fail(self, error: PSError) -> None:
        """Does nothing: the function that handles the request answers with the error."""

    def end(self) -> None:
        """Runs the callbacks: the request is answered."""
        for callback in self._callbacks:
            callback()


@dataclass(eq=False)
class Download:
    """A client that downloads an edition. error: why the download was ended"""

    caller: str
    error: PSError | None = field(default=None)

    def end(self, error: PSError) -> None:
        """Ends the download with an error."""
        self.error = error


class RelaySite:
    """Answers requests. Its methods may be called from any thread."""

    def __init__(self, relayed: Relayed, limits: CallLimits) -> None:
        self._relayed, self._limits = relayed, limits

    def answer(self, asked: WebRequest) -> Reply:
        """Returns the answer to a request."""
        call = _HttpCall(asked)
        try:
            with contextlib.ExitStack() as over:  # releases what an answer holds, after it or if there is none
                over.callback(call.end)
                reply = self._answer(asked, call, over)
                reply.close = over.pop_all().close
                return reply
        except PSError as error:
            status = next((status for kind, status in _STATUS if isinstance(error, kind)), "503 Service Unavailable")
            more = [("WWW-Authenticate", "Bearer")] if status.startswith("401") else []
            if status[:3] in ("429", "503"):
                more.append(("Retry-After", str(RETRY_SECONDS)))
            return text_reply(status, str(error), ("Cache-Control", "no-store"), *more)

    def _answer(self, asked: WebRequest, call: _HttpCall, over: contextlib.ExitStack) -> Reply:
        admitted = self._limits.enter(METHOD, call)
        found = _PATH.fullmatch(asked.path)
        if found is None:
            raise NotFound("here are /jobs/NAME/latest.safetensors and /jobs/NAME/editions/VERSION.safetensors")
        name, which = found.groups()
        wire = asked.query.get("wire", "float32")
        with self._limits.running(admitted):
            check_job(name)
        job = self._relayed.get(name, wire)
        if job.newest is None:
            job.wait(FIRST_SECONDS)
        return self._edition(asked, job, which, Download(admitted.caller.name), over)

    def _edition(
        self, asked: WebRequest, job: FollowedJob, which: str | None, reader: Download, over: contextlib.ExitStack
    ) -> Reply:
        known = asked.headers.get("if-none-match")
        kept = job.current if which is None else job.newest
        if kept is None:
            job.describe(False)  # raises the reason why there is none
        if known is not None and kept is not None and known == kept.etag and which is None:
            return _reply(job, kept, which)  # it is not held: no byte of it leaves
        if asked.method == "GET":
            self._relayed.check_feeds(job.name, reader.caller)
        over.callback(job.leave, reader)
        kept = job.hold(reader, lambda each: which is None or which in (str(each.arrays.version), each.etag.strip('"')))
        if kept is None:
            versions = ", ".join(str(each.arrays.version) for each in job.kept())
            raise NotFound(f"job {job.name!r} has no edition {which} here: there are {versions}")
        if asked.method == "GET":
            self._relayed.check_joined(kept.file.joined_bytes)
        reply = _reply(job, kept, which)
        reply.lost = lambda: reader.error is not None
        reply.sent = lambda size: job.sent(size, size)
        return reply


def _reply(job: FollowedJob, kept: KeptEdition, which: str | None) -> Reply:
    edition = kept.arrays
    # Another run, or a rollback, repeats a version number; the ETag is never repeated.
    is_fixed = which is not None and which == kept.etag.strip('"')
    headers = (
        ("Content-Type", "application/octet-stream"),
        ("Cache-Control", f"max-age={YEAR_SECONDS}, immutable" if is_fixed else "no-cache"),
        ("Age", "0" if is_fixed else str(int(kept.age()))),
        ("X-Model-Version", str(edition.version)),
        ("X-Model-Run", edition.run),
        ("X-Model-Behind", str(max(0, job.latest - edition.version))),
        ("X-Content-Type-Options", "nosniff"),
    )
    return Reply("200 OK", headers, kept.file.parts, kept.etag, size=kept.file.nbytes)
