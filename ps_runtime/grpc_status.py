"""Errors of the project as gRPC statuses, and back."""

from __future__ import annotations

import grpc
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped,unused-ignore]

from ps_protocol.errors import BY_REASON, DOMAIN, PSError, TryLater, Unreachable

LONGEST_RETRY_SECONDS = 60.0  # a number that a peer sent keeps no caller waiting for longer
PROGRESS_KEY = "progress"  # in an ErrorInfo's metadata
MAX_PROGRESS_LENGTH = 255
STATUS_KEY = "grpc-status-details-bin"  # the trailer in which gRPC carries a google.rpc.Status


def code_of(error: PSError) -> grpc.StatusCode:
    """Returns gRPC's name of an error's canonical code."""
    return grpc.StatusCode[error.code.name]


def status_of(error: PSError) -> status_pb2.Status:
    """Returns the google.rpc.Status of an error: its code, its message, an ErrorInfo with its reason, and when to try
    again where that is known."""
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
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.CANCELLED,
}


def error_from(call: grpc.RpcError, peer: str) -> PSError:
    """Returns the error that a failed call stands for: the server's own if it sent one, otherwise `Unreachable` or
    `PSError`.

    `peer` names the server that was called, for the message. A transport failure that may pass is a `TryLater`.
    """
    for key, value in getattr(call, "trailing_metadata", lambda: None)() or ():
        if key == STATUS_KEY:
            error = _error_in(status_pb2.Status.FromString(value), call.details())
            if error is not None:
                return error
    code = call.code()
    if code in _TRANSIENT:
        cause = (call.details() or code.name).rsplit("last error: ", 1)[-1]
        return TryLater(f"{peer} does not answer ({cause})")
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return Unreachable(f"{peer}: something else answers gRPC there ({call.details()})")
    return PSError(f"{peer} failed ({code.name}: {call.details()})")


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
