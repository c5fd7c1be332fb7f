"""Every error of the project, and how each crosses the wire.

    PSError
    ├── InvalidRequest        what came is wrong in itself: a shape, a size, a name, a value
    │   └── NonFiniteGradient an infinity or a NaN in a gradient
    ├── Unsupported           an optimizer, a sampler, a model that this project refuses, with what to use instead
    ├── JobMismatch           the job exists and is another one
    ├── JobInUse              live workers of another launch train the job
    ├── NotFound              no such job, bucket or shard
    ├── UnknownWorker         the caller is no live worker of the job: join first
    │   └── Fenced            a newer incarnation took the caller's place, or its lease ran out
    ├── NotShared             a shard cannot see a worker's memory: use the network
    ├── OutOfOrder            a push that skips a clock
    ├── TryLater              nothing is wrong; come back in a moment
    ├── LimitExceeded         past a named limit
    │   └── Backlogged        no room for a push yet; come back when it says
    ├── NoCheckpoints         no directory for checkpoints, or no checkpoint in it
    ├── CheckpointFailed      a checkpoint could not be written
    ├── CheckpointDamaged     what is on disk is not what was written
    ├── Unauthenticated       the caller has shown no token or certificate, or one that is not known here
    ├── Forbidden             the caller may not do this, or speaks for another
    └── Unreachable           no server answers at the address, or none of this kind
        └── Untrusted         the two ends of a TLS connection do not trust each other

A server raises one of these; `status_of` turns it into a gRPC code and an ErrorInfo reason; `error_from` turns these
back into the same class at the worker. Nothing is ever recognised by the text of a message.
"""

from __future__ import annotations

from typing import ClassVar

import grpc
from google.rpc import code_pb2, error_details_pb2, status_pb2  # type: ignore[import-untyped,unused-ignore]

DOMAIN = "ps_protocol"
LONGEST_RETRY_SECONDS = 60.0  # nobody is kept waiting for longer by a number that a peer sent
# Longer words are cut: gRPC carries them twice in the trailers of a call, which may hold 8 KiB in all.
MAX_MESSAGE_BYTES = 1500


class PSError(Exception):
    """Base of every error that this project raises on purpose."""

    reason: ClassVar[str] = "INTERNAL"
    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    retryable: ClassVar[bool] = False
    retry_after: float | None = None  # seconds after which to try again, where whoever refused says so

    def __str__(self) -> str:
        text = super().__str__().encode(errors="replace")
        if len(text) > MAX_MESSAGE_BYTES:
            text = text[: MAX_MESSAGE_BYTES - 3] + b"..."
        return text.decode(errors="ignore")

    @property
    def message(self) -> str:
        """What went wrong, in words."""
        return str(self)


class InvalidRequest(PSError, ValueError):
    """An argument or a request is wrong in itself; the message says what was expected and what came."""

    reason = "INVALID_REQUEST"
    code = grpc.StatusCode.INVALID_ARGUMENT


class NonFiniteGradient(InvalidRequest):
    """A gradient holds an infinity or a NaN, and the job refuses those."""

    reason = "NON_FINITE_GRADIENT"


class Unsupported(PSError, TypeError):
    """Something that works in PyTorch and not on a parameter server; the message says what to use instead."""

    reason = "UNSUPPORTED"
    code = grpc.StatusCode.UNIMPLEMENTED


class JobMismatch(PSError):
    """A job of that name exists and differs; the message names the difference."""

    reason = "JOB_MISMATCH"
    code = grpc.StatusCode.FAILED_PRECONDITION


class JobInUse(PSError):
    """Live workers of another launch hold the ranks of a job; the message names them and says what to do."""

    reason = "JOB_IN_USE"
    code = grpc.StatusCode.FAILED_PRECONDITION


class NotFound(PSError, LookupError):
    """No such job, bucket or shard."""

    reason = "NOT_FOUND"
    code = grpc.StatusCode.NOT_FOUND


class UnknownWorker(PSError):
    """The caller is no live worker of the job."""

    reason = "UNKNOWN_WORKER"
    code = grpc.StatusCode.FAILED_PRECONDITION


class Fenced(UnknownWorker):
    """A newer incarnation took the caller's place, or its lease ran out."""

    reason = "FENCED"


class NotShared(PSError):
    """A shard cannot see this worker's memory, or has none of it attached: the network is what is left."""

    reason = "NOT_SHARED"
    code = grpc.StatusCode.FAILED_PRECONDITION


class OutOfOrder(PSError):
    """A push that skips a clock: earlier steps of this worker never came."""

    reason = "OUT_OF_ORDER"
    code = grpc.StatusCode.FAILED_PRECONDITION


class TryLater(PSError):
    """Nothing is wrong; the same call may succeed in a moment."""

    reason = "TRY_LATER"
    code = grpc.StatusCode.UNAVAILABLE
    retryable = True


class LimitExceeded(PSError):
    """A limit was exceeded; the message names it."""

    reason = "LIMIT_EXCEEDED"
    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class Backlogged(LimitExceeded):
    """No room for a push yet, or its last one to the bucket is not applied; the same call may succeed later."""

    reason = "BACKLOGGED"
    retryable = True
    retry_after = 0.05  # a bucket is sent again in vain each time: not too often


class NoCheckpoints(PSError):
    """The servers were started without a directory for checkpoints, or there is none to go on from."""

    reason = "NO_CHECKPOINTS"
    code = grpc.StatusCode.FAILED_PRECONDITION


class CheckpointFailed(PSError):
    """A checkpoint could not be written; the one before it stays the last."""

    reason = "CHECKPOINT_FAILED"
    code = grpc.StatusCode.DATA_LOSS


class CheckpointDamaged(PSError):
    """What is on disk is not what was written: a checksum, a size or a shape is wrong, or a file is missing."""

    reason = "CHECKPOINT_DAMAGED"
    code = grpc.StatusCode.DATA_LOSS


class Unauthenticated(PSError, PermissionError):
    """The caller has shown neither a token nor a certificate that is known here."""

    reason = "UNAUTHENTICATED"
    code = grpc.StatusCode.UNAUTHENTICATED


class Forbidden(PSError, PermissionError):
    """The caller's roles do not let it do this, or it speaks for a worker that it is not."""

    reason = "FORBIDDEN"
    code = grpc.StatusCode.PERMISSION_DENIED


class Unreachable(PSError, ConnectionError):
    """No server answers at the address, or what answers is no server of this project."""

    reason = "UNREACHABLE"
    code = grpc.StatusCode.UNAVAILABLE


class Untrusted(Unreachable):
    """A TLS connection does not come about: a certificate, a CA or a host name is wrong; the message says which."""

    reason = "UNTRUSTED"


def _all_errors(root: type[PSError]) -> list[type[PSError]]:
    return [root, *(error for child in root.__subclasses__() for error in _all_errors(child))]


BY_REASON: dict[str, type[PSError]] = {error.reason: error for error in _all_errors(PSError)}


def status_of(error: PSError) -> status_pb2.Status:
    """The google.rpc.Status that says this error: its code, its message, an ErrorInfo with its reason, and when to try
    again where that is known."""
    status = status_pb2.Status(code=getattr(code_pb2, error.code.name), message=str(error))
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN))
    if error.retry_after is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after * 1e9))
        status.details.add().Pack(retry)
    return status


_TRANSIENT = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.ABORTED}


def error_from(call: grpc.RpcError, peer: str) -> PSError:
    """Returns the error that a failed call stands for: the server's own if it sent one, otherwise `Unreachable` or
    `PSError`.

    `peer` names the server that was called, for the message. A transport failure that may pass is a `TryLater`.
    """
    for key, value in getattr(call, "trailing_metadata", lambda: None)() or ():
        if key == "grpc-status-details-bin":
            found = _error_in(status_pb2.Status.FromString(value), call.details())
            if found is not None:
                return found
    code = call.code()
    if code in _TRANSIENT:
        cause = (call.details() or code.name).rsplit("last error: ", 1)[-1]
        return TryLater(f"{peer} does not answer ({cause})")
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return Unreachable(f"{peer}: something else answers gRPC there ({call.details()})")
    return PSError(f"{peer} failed ({code.name}: {call.details()})")


def _error_in(status: status_pb2.Status, text: str) -> PSError | None:
    """The error of ours that a status says, if it says one."""
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    found: PSError | None = None
    delay: float | None = None
    for detail in status.details:
        if detail.Unpack(info) and info.domain == DOMAIN and info.reason in BY_REASON:
            found = BY_REASON[info.reason](text)
        elif detail.Unpack(retry):
            delay = min(max(retry.retry_delay.ToNanoseconds() / 1e9, 0.0), LONGEST_RETRY_SECONDS)
    if found is not None:
        found.retry_after = delay
    return found
