"""Every error crosses the wire as itself: same class, same words, known by its reason and never by its text."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2
from prometheus_client import CollectorRegistry

from ps_protocol import errors
from ps_protocol.errors import BY_REASON, DOMAIN, PSError, TryLater, Unreachable
from ps_protocol.v1 import types_pb2
from ps_runtime import retry
from ps_runtime.channel import open_channel, server_options
from ps_runtime.grpc_status import LONGEST_RETRY_SECONDS, error_from, status_of
from ps_server.core.limits import Limits
from ps_server.rpc.auth import Authenticator
from ps_server.rpc.call_limits import CallLimits
from ps_server.rpc.interceptor import CallInterceptor
from ps_server.rpc.permissions import METHODS, Role

ERRORS = sorted(BY_REASON.values(), key=lambda error: error.__name__)
PEER = "shard 0 at somewhere"


def every_class(root: type[PSError] = PSError) -> list[type[PSError]]:
    return [root, *(found for child in root.__subclasses__() for found in every_class(child))]


@pytest.fixture(autouse=True)
def _no_surprises() -> None:
    """The server below fails on purpose, and logs it."""


@pytest.fixture(scope="module")
def channel() -> Iterator[grpc.Channel]:
    """To a real server whose one method fails as it is told, with "REASON words", or never answers."""

    def fail(request: bytes, context: grpc.ServicerContext) -> bytes:
        reason, _, words = request.decode().partition(" ")
        if reason == "SLEEP":
            ended = threading.Event()
            context.add_callback(ended.set)
            ended.wait(10)
            return b""
        bug = NotImplementedError if reason == "TORCH" else RuntimeError
        raise BY_REASON[reason](words) if reason in BY_REASON else bug(words)

    handlers = {"Fail": grpc.unary_unary_rpc_method_handler(fail)}
    gate = CallLimits(Authenticator(), Limits())
    with ThreadPoolExecutor(2) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, "/test.Failing/Fail", frozenset({Role.WORKER}))
        server = grpc.server(
            pool, interceptors=[CallInterceptor(CollectorRegistry(), gate, pool)], options=server_options()
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Failing", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with open_channel(f"127.0.0.1:{port}") as opened:
            yield opened
        server.stop(None).wait()
    gate.stop()


def failing(channel: grpc.Channel, request: str, method: str = "/test.Failing/Fail", timeout: float = 10) -> PSError:
    """The error that a client makes of a call that failed."""
    with pytest.raises(grpc.RpcError) as failed:
        channel.unary_unary(method)(request.encode(), timeout=timeout)
    return error_from(failed.value, PEER)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_an_error_arrives_as_the_class_and_the_words_it_left_as(channel: grpc.Channel, error: type[PSError]) -> None:
    found = failing(channel, f"{error.reason} expected 3 × 4, got 'ü'")
    assert (type(found), str(found)) == (error, "expected 3 × 4, got 'ü'")
    status, info = status_of(found), error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain, status.message) == (error.reason, DOMAIN, str(found))
    assert status.code == code_pb2.Code.Value(error.code.name)


def test_a_message_of_any_length_arrives(channel: grpc.Channel) -> None:
    """Trailing metadata has a limit of a few KiB; past it a client would see another error, or none."""
    for word in ("long ", "länger ", "長い "):
        found = failing(channel, "INVALID_REQUEST " + word * 20_000)
        assert type(found) is errors.InvalidRequest
        assert str(found).startswith(word * 50)
        assert str(found).endswith("...")


@pytest.mark.parametrize("kind", ["BUG", "TORCH"])
def test_an_error_that_nobody_meant_is_logged_and_keeps_its_text_to_itself(
    channel: grpc.Channel, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """torch raises NotImplementedError for an element type that it cannot compute with: no method is missing then."""
    found = failing(channel, f"{kind} password=hunter2")
    assert type(found) is PSError
    assert "hunter2" not in str(found)
    assert "internal error" in str(found)
    assert "hunter2" in caplog.text


def test_the_contract_lists_every_reason() -> None:
    names = {name.removeprefix("ERROR_REASON_") for name, number in types_pb2.ErrorReason.items() if number}
    assert names == BY_REASON.keys()


def test_reasons_are_distinct_and_each_class_has_its_own() -> None:
    classes = every_class()
    assert len({error.reason for error in classes}) == len(classes) == len(BY_REASON)
    assert all(re.fullmatch(r"[A-Z][A-Z_]{0,62}", error.reason) for error in classes)


def test_only_what_may_pass_is_worth_a_retry() -> None:
    assert {error.__name__ for error in ERRORS if error.retryable} == {"TryLater", "Backlogged"}


def carrying(status: status_pb2.Status) -> grpc.RpcError:
    """A call that failed with a status, as a client of gRPC sees it."""

    class Call(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.FAILED_PRECONDITION

        def details(self) -> str:
            return status.message

        def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
            return (("grpc-status-details-bin", status.SerializeToString()),)

    return Call()


def test_a_refusal_says_when_to_come_back_and_no_number_keeps_a_client_waiting_for_ever(channel: grpc.Channel) -> None:
    assert failing(channel, "BACKLOGGED words").retry_after == errors.Backlogged.retry_after
    assert failing(channel, "LIMIT_EXCEEDED words").retry_after is None
    patient = errors.Backlogged("words")
    patient.retry_after = 1e9
    assert error_from(carrying(status_of(patient)), PEER).retry_after == LONGEST_RETRY_SECONDS


def test_an_error_info_of_another_project_is_not_taken_for_ours() -> None:
    status = status_of(errors.Fenced("words"))
    del status.details[:]
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="FENCED", domain="example.com"))
    assert type(error_from(carrying(status), PEER)) is PSError


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn: list[tuple[str, str]] = []
    path = {0: "PSError"}
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"    ((?:│   |    )*)[├└]── (\w+)", line)
        if found:
            depth = len(found[1]) // 4 + 1
            path[depth] = found[2]
            drawn.append((found[2], path[depth - 1]))
    tree = [(error.__name__, error.__bases__[0].__name__) for error in every_class() if error is not PSError]
    assert sorted(drawn) == sorted(tree)


def test_an_address_where_nothing_answers_is_something_to_try_again(channel: grpc.Channel) -> None:
    with open_channel("127.0.0.1:1") as nothing:
        found = failing(nothing, "", timeout=5)
    assert type(found) is TryLater
    assert str(found).startswith(f"{PEER} does not answer (")
    assert "\n" not in str(found)
    assert type(failing(channel, "SLEEP", timeout=0.1)) is TryLater, "nor in time"


def test_something_else_that_speaks_grpc_is_no_server_of_ours(channel: grpc.Channel) -> None:
    found = failing(channel, "", method="/other.Service/Method")
    assert type(found) is Unreachable
    assert "something else answers gRPC there" in str(found)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.InvalidRequest, ValueError),
        (errors.Unsupported, TypeError),
        (errors.NotFound, LookupError),
        (errors.Unreachable, ConnectionError),
    ],
)
def test_errors_are_also_what_python_would_have_raised(error: type[PSError], builtin: type[Exception]) -> None:
    assert issubclass(error, builtin)


def test_how_far_it_is_what_a_caller_waits_for_crosses_the_wire() -> None:
    error = TryLater("a shard reads")
    assert error_from(carrying(status_of(error)), PEER).progress is None
    error.progress = "000012:" + "1" * 1000
    assert error_from(carrying(status_of(error)), PEER).progress == error.progress[:255]


def test_a_caller_waits_as_long_as_what_it_waits_for_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class AtOnce(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            now[0] += timeout or 0.0
            return False

    monkeypatch.setattr(retry.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(retry.tls_diagnosis, "explain", lambda *_: None)
    loop = retry.Retry(retry.Peer("coordinator", "127.0.0.1:1"), 1.0, AtOnce())

    def wait(progress: str | None) -> None:
        error = TryLater("a shard reads")
        error.progress = progress
        loop.wait_after(error)

    for done in range(1000):
        wait(f"000012:{done}")
    assert now[0] > 10.0
    stands_still = now[0]
    with pytest.raises(Unreachable, match="gave up after 1 s: a shard reads"):  # noqa: PT012 (which one is not said)
        for _ in range(1000):
            wait("000012:999")
    assert now[0] - stands_still < 5.0
