"""Errors of the project as gRPC statuses, and back."""

from __future__ import annotations

import grpc
from google.rpc import code_pb2, error_details_pb2, status_pb2  # type: ignore[import-untyped,unused-ignore]

from ps_protocol.errors import BY_REASON, DOMAIN, PSError, TryLater, Unreachable

LONGEST_RETRY_SECONDS = 60.0  # a number that a peer sent keeps no caller waiting for longer
PROGRESS_KEY = "progress"  # in an ErrorInfo's metadata
MAX_PROGRESS_LENGTH = 255
STATUS_KEY = "grpc-status-details-bin"  # the trailer in which gRPC carries a google.rpc.Status


class CallFailed(Exception):
    """A call to a server that failed, over a connection of any kind.

    code:    a number of google.rpc.Code
    details: the text
    status:  the server's own error, as a serialized google.rpc.Status; empty: it sent none
    """

    def __init__(self, code: int, details: str, status: bytes = b"") -> None:
        super().__init__(details)
        self.code, self.details, self.status = code, details, status

    def anew(self) -> CallFailed:
        """Returns a copy without its traceback, for another caller: threads that raise one error share its traceback,
        which grows with each, and keeps the variables of all of them alive.
        """
        return CallFailed(self.code, self.details, self.status)


def failure_of(call: grpc.RpcError) -> CallFailed:
    """Returns a gRPC error as a CallFailed."""
    trailers = getattr(call, "trailing_metadata", lambda: None)() or ()
    status = next((value for key, value in trailers if key == STATUS_KEY), b"")
    return CallFailed(call.code().value[0], call.details() or "", status)


def failure_in(status: bytes) -> CallFailed:
    """Returns a serialized google.rpc.Status as a CallFailed."""
    read = status_pb2.Status.FromString(status)
    return CallFailed(read.code, read.message, status)


def code_of(error: PSError) -> grpc.StatusCode:
    """Returns gRPC's name of an error's canonical code."""
    return grpc.StatusCode[error.code.name]


def status_of(error: PSError) -> status_pb2.Status:
    """Returns an error as a google.rpc.Status: its code, its message, an ErrorInfo with its reason, and a RetryInfo if
    the error says when to try again.
    """
    status = status_pb2.Status(code=int(error.code), message=str(error))
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    if error.progress is not None:
        info.metadata[PROGRESS_KEY] = error.progress
    status.details.add().Pack(info)
    if error.retry_after is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after * 1e9))
        status.details.add().Pack(retry)
    return status


# CANCELLED among them: a server that stops, or finds a peer too slow, cancels calls.
_TRANSIENT = {
    code_pb2.UNAVAILABLE,
    code_pb2.DEADLINE_EXCEEDED,
    code_pb2.ABORTED,
    code_pb2.CANCELLED,
}
FAILURES = (grpc.RpcError, CallFailed)  # the errors of a failed call, one for each kind of connection


def error_from(call: grpc.RpcError | CallFailed, peer: str) -> PSError:
    """Returns a failed call as an error: the server's own if it sent one, otherwise `Unreachable` or `PSError`;
    `TryLater` for a transport failure that may pass.

    peer: the server that was called, for the message
    """
    failed = call if isinstance(call, CallFailed) else failure_of(call)
    if failed.status:
        error = _error_in(status_pb2.Status.FromString(failed.status), failed.details)
        if error is not None:
            return error
    name = code_pb2.Code.Name(failed.code) if failed.code in code_pb2.Code.values() else str(failed.code)
    if failed.code in _TRANSIENT:
        cause = (failed.details or name).rsplit("last error: ", 1)[-1]
        return TryLater(f"{peer} does not answer ({cause})")
    if failed.code == code_pb2.UNIMPLEMENTED:
        return Unreachable(f"{peer}: something else answers gRPC there ({failed.details})")
    return PSError(f"{peer} failed ({name}: {failed.details})")


def _error_in(status: status_pb2.Status, text: str) -> PSError | None:
    """Returns the error of this project that a status carries; None for a status of another project."""
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    error: PSError | None = None
    delay: float | None = None
    for detail in status.details:
        if detail.Unpack(info) and info.domain == DOMAIN and info.reason in BY_REASON:
            error = BY_REASON[info.reason](text)
            error.progress = info.metadata.get(PROGRESS_KEY, "")[:MAX_PROGRESS_LENGTH] or None
        elif detail.Unpack(retry):
            delay = min(max(retry.retry_delay.ToNanoseconds() / 1e9, 0.0), LONGEST_RETRY_SECONDS)
    if error is not None:
        error.retry_after = delay
    return error
