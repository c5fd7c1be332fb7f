"""Every error of the project, its reason and its canonical code.

    PSError
    ├── InvalidRequest        a shape, a size, a name or a value is wrong in itself
    │   └── NonFiniteGradient an infinity or a NaN in a gradient
    ├── Unsupported           an optimizer, a sampler, a model that this project refuses, with what to use instead
    ├── JobMismatch           the job exists and is another one
    ├── JobInUse              live workers of another launch train the job
    ├── NotFound              no such job, bucket or shard
    │   ├── RunEnded          the run of a job has ended, and a later one has its name
    │   ├── JobFinished       the job is done, and this worker comes late
    │   └── FinishedWithout   the job is done, and this worker, which had taken part, was away
    ├── VersionMismatch       the two ends speak versions of the protocol that do not fit
    ├── UnknownWorker         the caller is no live worker of the job: join first
    │   └── Fenced            a newer incarnation took the caller's place, or its lease ran out
    ├── Deposed               a shard obeys a later coordinator than the caller
    ├── NotShared             a shard cannot see a worker's memory: use the network
    ├── OutOfOrder            a push that skips a clock
    ├── TryLater              nothing is wrong; the call may succeed in a moment
    ├── LimitExceeded         past a named limit
    │   └── Backlogged        no room for a push, a pull or a call yet; try again at the time it names
    ├── NoCheckpoints         no directory for checkpoints, or no checkpoint in it
    ├── CheckpointFailed      a checkpoint could not be written
    ├── CheckpointDamaged     a file on disk differs from the file that was written
    ├── Unauthenticated       the caller has no token or certificate, or one that the server does not know
    ├── Forbidden             the caller may not do this, or speaks for another
    └── Unreachable           no server answers at the address, or none of this kind
        └── Untrusted         the two ends of a TLS connection do not trust each other

An error that a server raises crosses the wire as a canonical code and a reason, and the worker raises the same class
(ps_runtime/grpc_status.py). No code recognises an error by the text of its message.
"""

from __future__ import annotations

import enum
from typing import ClassVar, TypeVar

DOMAIN = "ps_protocol"  # of a reason, in an ErrorInfo
# A longer message is cut. gRPC sends it twice in a call's trailers (grpc-message and grpc-status-details-bin), and its
# default limit for all metadata is 8 KiB.
MAX_TEXT_BYTES = 1500


class Code(enum.IntEnum):
    """The canonical codes of google.rpc.Code that errors here have; gRPC's have the same names."""

    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class PSError(Exception):
    """Base of every error that this project raises on purpose."""

    reason: ClassVar[str] = "INTERNAL"
    code: ClassVar[Code] = Code.INTERNAL
    retryable: ClassVar[bool] = False
    retry_after: float | None = None  # seconds after which to try again, if the server names them
    progress: str | None = None  # the state of an awaited event: a changed text shows that it makes progress

    def __str__(self) -> str:
        text = super().__str__().encode(errors="replace")
        if len(text) > MAX_TEXT_BYTES:
            text = text[: MAX_TEXT_BYTES - 3] + b"..."
        return text.decode(errors="ignore")


Error = TypeVar("Error", bound=PSError)
AnyError = TypeVar("AnyError", bound=BaseException)


def anew(error: Error) -> Error:
    """Returns a copy of an error without its traceback, cause and context.

    An error that is stored, or raised more than once, would keep all variables of the frames in its traceback alive.
    """
    same = type(error)(*error.args)
    vars(same).update(vars(error))
    return same


def without_traceback(error: AnyError) -> AnyError:
    """Drops the tracebacks of an error and of those before it, and returns the error itself.

    Its traceback refers to the frames that it has passed, and these to the callers' frames. Where one of them keeps the
    error in a variable, this is a cycle that only the garbage collector frees, with all that the frames have.
    """
    raised: BaseException | None = error
    while raised is not None:
        raised.__traceback__ = None
        raised = raised.__context__
    return error


class InvalidRequest(PSError, ValueError):
    """An argument or a request is wrong in itself; the message says what was expected and what came."""

    reason = "INVALID_REQUEST"
    code = Code.INVALID_ARGUMENT


class NonFiniteGradient(InvalidRequest):
    """A gradient holds an infinity or a NaN, and the job refuses those."""

    reason = "NON_FINITE_GRADIENT"


class Unsupported(PSError, TypeError):
    """Something that works in PyTorch and not on a parameter server; the message says what to use instead."""

    reason = "UNSUPPORTED"
    code = Code.UNIMPLEMENTED


class JobMismatch(PSError):
    """A job of that name exists and differs; the message names the difference."""

    reason = "JOB_MISMATCH"
    code = Code.FAILED_PRECONDITION


class JobInUse(PSError):
    """Live workers of another launch hold the ranks of a job; the message names them and says what to do."""

    reason = "JOB_IN_USE"
    code = Code.FAILED_PRECONDITION


class NotFound(PSError, LookupError):
    """No such job, bucket or shard."""

    reason = "NOT_FOUND"
    code = Code.NOT_FOUND


class RunEnded(NotFound):
    """The run of a job that the caller belongs to has ended, and a later run has the job's name."""

    reason = "RUN_ENDED"


class JobFinished(NotFound):
    """The job has finished, and the caller belongs to a launch that took part in it: there is nothing to do."""

    reason = "JOB_FINISHED"


class FinishedWithout(NotFound):
    """The job has finished while the caller, which had trained there or in another job of its launch, was away: the
    job's weights are gone."""

    reason = "FINISHED_WITHOUT"


class VersionMismatch(PSError):
    """The two ends speak versions of the protocol that do not fit; the message says which to upgrade."""

    reason = "VERSION_MISMATCH"
    code = Code.FAILED_PRECONDITION


class UnknownWorker(PSError):
    """The caller is no live worker of the job."""

    reason = "UNKNOWN_WORKER"
    code = Code.FAILED_PRECONDITION


class Fenced(UnknownWorker):
    """A newer incarnation took the caller's place, or its lease ran out."""

    reason = "FENCED"


class Deposed(PSError):
    """A shard obeys a later coordinator than the caller, which has lost its lease."""

    reason = "DEPOSED"
    code = Code.FAILED_PRECONDITION


class NotShared(PSError):
    """A shard cannot use this worker's shared memory, or has not attached it."""

    reason = "NOT_SHARED"
    code = Code.FAILED_PRECONDITION


class OutOfOrder(PSError):
    """A push skips a clock: earlier steps of this worker are missing."""

    reason = "OUT_OF_ORDER"
    code = Code.FAILED_PRECONDITION


class TryLater(PSError):
    """Nothing is wrong; the same call may succeed in a moment."""

    reason = "TRY_LATER"
    code = Code.UNAVAILABLE
    retryable = True


class LimitExceeded(PSError):
    """A limit was exceeded; the message names it."""

    reason = "LIMIT_EXCEEDED"
    code = Code.RESOURCE_EXHAUSTED


class Backlogged(LimitExceeded):
    """No room for a push, a pull or a call yet, or the last push is not applied; the same may succeed later."""

    reason = "BACKLOGGED"
    retryable = True
    retry_after = 0.05  # not less: each refused attempt has sent a whole bucket


class NoCheckpoints(PSError):
    """The servers were started without a directory for checkpoints, or there is none to continue from."""

    reason = "NO_CHECKPOINTS"
    code = Code.FAILED_PRECONDITION


class CheckpointFailed(PSError):
    """A checkpoint could not be written; the one before it stays the last."""

    reason = "CHECKPOINT_FAILED"
    code = Code.DATA_LOSS


class CheckpointDamaged(PSError):
    """A checksum, a size or a shape of a checkpoint's file is wrong, or a file is missing."""

    reason = "CHECKPOINT_DAMAGED"
    code = Code.DATA_LOSS


class Unauthenticated(PSError, PermissionError):
    """The caller has neither a token nor a certificate that the server knows."""

    reason = "UNAUTHENTICATED"
    code = Code.UNAUTHENTICATED


class Forbidden(PSError, PermissionError):
    """The caller's roles do not permit the call, or it acts for another worker."""

    reason = "FORBIDDEN"
    code = Code.PERMISSION_DENIED


class Unreachable(PSError, ConnectionError):
    """No server answers at the address, or what answers is no server of this project."""

    reason = "UNREACHABLE"
    code = Code.UNAVAILABLE


class Untrusted(Unreachable):
    """A TLS handshake failed: a certificate, a CA or a host name is wrong; the message says which."""

    reason = "UNTRUSTED"


def _all_errors(root: type[PSError]) -> list[type[PSError]]:
    return [root, *(error for child in root.__subclasses__() for error in _all_errors(child))]


BY_REASON: dict[str, type[PSError]] = {error.reason: error for error in _all_errors(PSError)}
