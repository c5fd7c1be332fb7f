"""A relay serves editions over HTTP, as safetensors files: whole, a range, or that nothing has changed."""

from __future__ import annotations

import contextlib
import http.client
import random
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, NoReturn

import grpc
import numpy as np
import pytest
from safetensors.torch import load

import ps_torch as ps
from ps_feed.edition import Arriving, Contents, EditionArrays, Tensor
from ps_feed.edition_file import EditionFile
from ps_protocol.errors import LimitExceeded
from ps_protocol.layout import ParameterSpec, PiecePlace
from ps_protocol.messages.editions import EditionBucket
from ps_protocol.v1 import feed_pb2
from ps_runtime import downloads
from ps_runtime.arrivals import HostLimits
from ps_runtime.channel import open_channel
from ps_runtime.credentials import tls
from ps_server.config import ServerConfig
from ps_server.core.limits import DEFAULTS
from ps_server.ops import dev_certs
from ps_server.relay_server import RelayServer
from ps_server.rpc import relay_site
from tests.tools.cluster import Cluster, until
from tests.tools.followed_trainer import FollowedTrainer, relay
from tests.tools.fuzz import _damage
from tests.tools.fuzz_requests import SEEDS
from tests.tools.raw_worker import vector_job

Answer = tuple[int, dict[str, str], bytes]
SECRET = "0123456789abcdef" * 2


@pytest.fixture
def near(shared: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[RelayServer]:
    """A relay that has no request wait for the first edition of a job."""
    monkeypatch.setattr(relay_site, "FIRST_SECONDS", 0.1)
    with relay(shared.address, http_port=0) as running:
        yield running


def ask(near: RelayServer, path: str, method: str = "GET", **headers: str) -> Answer:
    connection = http.client.HTTPConnection(near.http_address, timeout=30)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    finally:
        connection.close()


def newest(near: RelayServer, job: str, version: int, method: str = "GET", wire: str = "float32") -> Answer:
    def asked() -> Answer | None:
        answer = ask(near, f"/jobs/{job}/latest.safetensors?wire={wire}", method)
        return answer if answer[1].get("x-model-version") == str(version) else None

    answer = until(asked, f"version {version}")
    assert answer is not None
    return answer


def test_the_newest_edition_is_a_file_of_the_weights_to_the_bit(
    near: RelayServer, job: str, trainer: FollowedTrainer
) -> None:
    last = trainer.steps(3)
    status, headers, body = newest(near, job, last)
    assert status == 200
    assert trainer.has(load(body), last)
    run = near.relayed.followed()[0].describe(False).run
    assert headers["etag"] == f'"{run}-{last}"'
    assert (headers["cache-control"], headers["x-model-run"], headers["x-model-behind"]) == ("no-cache", run, "0")
    status, again, nothing = ask(near, f"/jobs/{job}/latest.safetensors", "HEAD")
    assert (status, again["content-length"], again["etag"], nothing) == (200, str(len(body)), headers["etag"], b"")
    _, tags, narrow = newest(near, job, last, wire="bfloat16")
    name = tags["etag"].strip('"')
    assert ask(near, f"/jobs/{job}/editions/{name}.safetensors?wire=bfloat16")[2] == narrow
    assert ask(near, f"/jobs/{job}/latest.safetensors", if_none_match=tags["etag"])[0] == 200, "its bytes are others"
    assert len(narrow) < len(body)


def test_what_has_not_changed_is_not_sent_again(near: RelayServer, job: str, trainer: FollowedTrainer) -> None:
    _, headers, body = newest(near, job, 0)
    path, etag = f"/jobs/{job}/latest.safetensors", headers["etag"]
    for condition in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        status, same, nothing = ask(near, path, if_none_match=condition)
        assert (status, same["etag"], nothing) == (304, etag, b"")
        assert "content-length" not in same
    assert ask(near, path, if_none_match='"other"')[2] == body
    last = trainer.steps(1)
    newest(near, job, last)
    status, later, _ = ask(near, path, if_none_match=etag)
    assert (status, later["x-model-version"]) == (200, str(last))


def test_an_edition_by_its_version_may_change_and_by_its_name_never(
    near: RelayServer, job: str, trainer: FollowedTrainer
) -> None:
    first = newest(near, job, 0)
    last = trainer.steps(1)
    second = newest(near, job, last)
    for _, headers, body in (first, second):
        name, version = headers["etag"].strip('"'), headers["x-model-version"]
        status, found, same = ask(near, f"/jobs/{job}/editions/{name}.safetensors")
        assert (status, found["cache-control"], same) == (200, "max-age=31536000, immutable", body)
        status, found, same = ask(near, f"/jobs/{job}/editions/{version}.safetensors")
        assert (status, found["cache-control"], same) == (200, "no-cache", body)
    status, _, text = ask(near, f"/jobs/{job}/editions/77.safetensors")
    assert (status, text.decode()) == (404, f"job {job!r} has no edition 77 here: there are 0, {last}\n")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_download_goes_on_at_another_relay(
    shared: Cluster, job: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have the edition under one ETag, in which async has the versions of all buckets."""
    monkeypatch.setattr(relay_site, "FIRST_SECONDS", 0.1)
    path = f"/jobs/{job}/latest.safetensors"
    with (
        relay(shared.address, http_port=0) as first,
        relay(shared.address, http_port=0) as second,
        shared.connect(mode, job=job) as session,
    ):
        trainer = FollowedTrainer(session)
        last = trainer.steps(3)
        _, headers, body = newest(first, job, last)
        etag, half = headers["etag"], len(body) // 2
        until(lambda: ask(second, path, "HEAD")[1].get("etag") == etag, "the edition at the other relay")
        begun = ask(first, path, range=f"bytes=0-{half - 1}")
        status, _, rest = ask(second, path, range=f"bytes={half}-", if_range=etag)
        assert (begun[0], status) == (206, 206)
        assert begun[2] + rest == body
        assert trainer.has(load(begun[2] + rest), last)
        newest(second, job, trainer.steps(1))
        status, _, whole = ask(second, path, range=f"bytes={half}-", if_range=etag)
        assert (status, len(whole)) == (200, len(body)), "a newer edition is sent from its begin"


RANGES = (
    ("bytes=0-9", 0, 10),
    ("bytes=100-", 100, None),
    ("bytes=-7", -7, None),
    ("bytes=5-999999999", 5, None),
)


def test_a_range_is_that_part_of_the_file(near: RelayServer, job: str, trainer: FollowedTrainer) -> None:
    _, headers, body = newest(near, job, 0)
    path = f"/jobs/{job}/latest.safetensors"
    for asked, start, end in RANGES:
        code, found, part = ask(near, path, range=asked)
        assert (code, part) == (206, body[start:end]), asked
        first = start % len(body)
        assert found["content-range"] == f"bytes {first}-{first + len(part) - 1}/{len(body)}"
        assert ask(near, path, range=asked, if_range=headers["etag"])[0] == 206
        assert ask(near, path, range=asked, if_range='"other"')[2] == body
    for asked in ("bytes=9-5", "bytes=-", "bytes=0-1,4-5", "lines=0-1"):
        code, _, whole = ask(near, path, range=asked)
        assert (code, whole) == (200, body), asked
    for asked in ("bytes=999999999-", "bytes=-0"):
        code, found, _ = ask(near, path, range=asked)
        assert (code, found["content-range"]) == (416, f"bytes */{len(body)}"), asked


def test_a_job_without_a_whole_edition_is_503_and_one_that_is_not_there_404(near: RelayServer, shared: Cluster) -> None:
    status, headers, text = ask(near, "/jobs/nothing/latest.safetensors")
    assert (status, text) == (404, f"no job 'nothing' at {shared.address}\n".encode())
    assert headers["cache-control"] == "no-store"
    with relay("127.0.0.1:1", http_port=0) as lost:
        status, headers, _ = ask(lost, "/jobs/default/latest.safetensors")
        assert (status, headers["retry-after"]) == (503, "1")


def test_a_job_that_has_ended_stays_while_it_is_asked_for(near: RelayServer, shared: Cluster, job: str) -> None:
    with shared.connect("sync", job=job) as session:
        trainer = FollowedTrainer(session)
        last = trainer.steps(2)
        newest(near, job, last)
    until(lambda: near.relayed.followed()[0].ended, "the end")
    assert trainer.has(load(newest(near, job, last)[2]), last)


@pytest.mark.parametrize(
    ("path", "method", "status", "said"),
    [
        ("/", "GET", 404, "here are /jobs/NAME/latest.safetensors"),
        ("/jobs/x/../y/latest.safetensors", "GET", 404, "here are"),
        ("/jobs/x/latest.safetensors?wire=int8", "GET", 400, "an edition travels in float32, bfloat16, float16"),
        ("/jobs/x/latest.safetensors", "POST", 405, "only to be read"),
        ("/jobs/x/latest.safetensors?" + "&".join("abcdefghi"), "GET", 400, ""),
    ],
)
def test_what_is_no_download_is_refused(near: RelayServer, path: str, method: str, status: int, said: str) -> None:
    code, _, text = ask(near, path, method)
    assert code == status
    assert said in text.decode()


@pytest.mark.parametrize(
    "raw",
    [
        b"GET /jobs/x/latest.safetensors\r\n\r\n",
        b"GET /jobs/x/latest.safetensors HTTP/2.0\r\n\r\n",
        b"GET http://127.0.0.1/ HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : 127.0.0.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: other\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n folded\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\n\r\nhello",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"a%d: 1\r\n" % each for each in range(100)) + b"\r\n",
        b"GET /" + b"a" * 40_000,
        b"\xff\xfe\x00\x00\r\n\r\n",
        b"GET /\tx HTTP/1.1\r\n\r\n",
        b"GET /\nx HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nRange: bytes=0-1\nX-Second: 1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nRange: bytes=0-1\rX-Second: 1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nRange: \x00\r\n\r\n",
    ],
)
def test_bytes_that_are_no_request_get_one_answer_and_the_end(near: RelayServer, raw: bytes) -> None:
    host, port = near.http_address.split(":")
    with socket.create_connection((host, int(port)), 30) as connection:
        with contextlib.suppress(ConnectionError):  # the answer may come, and the end, before all is sent
            connection.sendall(raw)
        answer = b""
        while more := connection.recv(65536):
            answer += more
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")


def test_a_page_of_another_site_cannot_read_the_weights(near: RelayServer, job: str, trainer: FollowedTrainer) -> None:
    status, _, text = ask(near, f"/jobs/{job}/latest.safetensors", host="evil.example")
    assert (status, b"for this machine alone" in text) == (403, True)


def test_while_a_job_has_a_new_run_without_an_edition_the_one_before_is_not_the_latest(
    near: RelayServer, shared: Cluster, job: str
) -> None:
    with shared.connect("sync", job=job) as session:
        last = FollowedTrainer(session).steps(1)
        old = newest(near, job, last)
    followed, path = near.relayed.followed()[0], f"/jobs/{job}/latest.safetensors"
    until(lambda: followed.ended, "the end")
    followed.follow_again()  # as when the upstream has told of a new run
    status, headers, text = ask(near, path)
    assert (status, headers["retry-after"]) == (503, "1")
    assert b"no edition of the new run" in text
    assert ask(near, path, if_none_match=old[1]["etag"])[0] == 503
    name = old[1]["etag"].strip('"')
    assert ask(near, f"/jobs/{job}/editions/{name}.safetensors")[2] == old[2], "it may be had by its name"
    with shared.connect("sync", job=job) as session:
        FollowedTrainer(session)
        assert newest(near, job, 0)[1]["x-model-run"] > old[1]["x-model-run"]


def test_without_memory_for_an_edition_none_is_received(
    near: RelayServer, job: str, trainer: FollowedTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, free = f"/jobs/{job}/latest.safetensors", "ps_server.relay.room.free_bytes"
    monkeypatch.setattr(free, lambda: 999)
    until(lambda: ask(near, path)[0] == 429, "that it is refused")
    status, headers, text = ask(near, path)
    assert (status, headers["retry-after"]) == (429, "1")
    size = int(re.findall(rb"no room for an edition of (\d+) bytes: 999 are free", text)[0])
    monkeypatch.setattr(free, lambda: size)
    assert size < len(newest(near, job, 0)[2])
    monkeypatch.setattr(free, lambda: 999)
    followed = near.relayed.followed()[0]

    def is_held() -> bool:
        trainer.step()  # one edition may be under way
        return isinstance(followed.trouble, LimitExceeded)

    until(is_held, "that no more is received", every=0.1)
    held = ask(near, path)
    assert held[0] == 200, "the last one is there"
    assert trainer.has(load(held[2]), int(held[1]["x-model-version"]))
    monkeypatch.setattr(free, lambda: None)  # unknown
    newest(near, job, trainer.step())


class JoinedEdition(EditionArrays):
    """Of a job of groups of four members, which have a quarter each of one tensor. Notes when it is joined."""

    joined: ClassVar[list[str]] = []

    def tensor(self, name: str) -> Tensor:
        self.joined.append(name)
        return super().tensor(name)


def joined_edition() -> JoinedEdition:
    pieces = [
        ParameterSpec("w", (64, 128), "float32", 0, member=member, piece=PiecePlace((128, 256), at))
        for member, at in enumerate((row, column) for row in (0, 64) for column in (0, 128))
    ]
    spec = replace(vector_job("job", "sync", 64, 1), parameters=tuple(pieces), group_size=4)
    contents = Contents(spec, None, "float32")
    values = np.random.default_rng(1)
    spaces = {
        bucket.space: values.random(contents.layout.space_sizes[bucket.space], np.float32).view(np.uint8)
        for bucket in contents.buckets.values()
    }
    return JoinedEdition(contents, "run", 1, {}, 0, spaces, {})


def test_tensors_in_pieces_are_joined_as_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JoinedEdition, "joined", [])
    edition = joined_edition()
    file = EditionFile(edition, "job")
    expected = EditionArrays.tensor(edition, "w").values

    def app(asked: downloads.WebRequest) -> downloads.Reply:
        return downloads.Reply(body=file.parts, etag='"one"', size=file.nbytes)

    port, stop = downloads.serve_downloads("127.0.0.1", 0, app, "--port", None, HostLimits(64, 64), 30.0)

    def get(method: str = "GET", **headers: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        with contextlib.closing(connection):
            connection.request(method, "/", headers={name.replace("_", "-"): value for name, value in headers.items()})
            return connection.getresponse().read()

    try:
        assert get("HEAD") + get(if_none_match='"one"') == b""
        assert (JoinedEdition.joined, file.joined_bytes) == ([], expected.nbytes), "sizes follow from the job"
        whole = get()
        assert load(whole)["w"].numpy().tolist() == expected.tolist()
        assert get(range="bytes=70000-99999") == whole[70000:100000]
        assert get(range=f"bytes={file.nbytes - 9}-") == whole[-9:]
        assert JoinedEdition.joined == ["w"] * 3, "it is not kept"
    finally:
        stop()


def test_without_memory_for_a_tensor_that_is_joined_a_download_is_refused(
    near: RelayServer, job: str, trainer: FollowedTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = newest(near, job, 0)[2]
    path = f"/jobs/{job}/latest.safetensors"
    monkeypatch.setattr("ps_server.relay.room.free_bytes", lambda: 999)
    assert ask(near, path)[2] == body, "nothing is joined"
    kept = near.relayed.followed()[0].newest
    assert kept is not None
    kept.file.joined_bytes = 999
    status, _, text = ask(near, path)
    assert (status, b"no room to join the pieces of a tensor of 999 bytes" in text) == (429, True)
    assert ask(near, path, "HEAD")[0] == 200


def test_editions_that_arrive_at_the_same_time_do_not_count_on_the_same_memory(
    shared: Cluster, near: RelayServer, job: str, trainer: FollowedTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ps.subscribe(shared.address, job) as feed:
        contents = feed.wait_for().arrays.contents
    both = contents.nbytes + Contents(contents.spec, None, "bfloat16").nbytes
    free = [both - 1]
    arrives, goes_on, take = threading.Event(), threading.Event(), Arriving.take

    def slow(self: Arriving, sent: EditionBucket, timeline: int, what: str) -> None:
        if self._contents.wire == "float32":
            arrives.set()
            goes_on.wait(60)
        take(self, sent, timeline, what)

    monkeypatch.setattr("ps_server.relay.room.free_bytes", lambda: free[0])
    try:
        with monkeypatch.context() as patched:
            patched.setattr(Arriving, "take", slow)
            whole = near.relayed.get(job, "float32")
            assert arrives.wait(60)
            narrow = near.relayed.get(job, "bfloat16")
            until(lambda: isinstance(narrow.trouble, LimitExceeded) or narrow.newest, "what becomes of the other")
            assert narrow.newest is None
            said = f"{both - 1} are free, of which editions that are arriving still take {contents.nbytes}"
            assert said in str(narrow.trouble)
            free[0] = both
            until(lambda: narrow.newest is not None, "that there is room for both")
    finally:
        goes_on.set()
    until(lambda: whole.newest is not None, "the one that was slow")
    free[0] = both - 1
    last = trainer.step()
    until(lambda: {each.describe(False).lowest for each in (whole, narrow)} == {last}, "one after the other")


def test_an_answer_that_cannot_be_made_holds_nothing(
    near: RelayServer,
    job: str,
    trainer: FollowedTrainer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    newest(near, job, 0)
    over: list[bool] = []
    end = relay_site._HttpCall.end

    def ends(call: relay_site._HttpCall) -> None:
        end(call)
        over.append(True)

    def breaks(*_: object) -> NoReturn:
        assert near.relayed.followed()[0].callers(), "it is held"
        raise RuntimeError("as a fault would")

    monkeypatch.setattr(relay_site._HttpCall, "end", ends)
    with monkeypatch.context() as patched:
        patched.setattr(relay_site, "_reply", breaks)
        assert ask(near, f"/jobs/{job}/latest.safetensors")[0] == 500
    assert "as a fault would" in caplog.text
    until(lambda: over, "the end of the call")
    assert over == [True]
    assert near.relayed.followed()[0].callers() == []


def test_one_connection_asks_again_and_again(near: RelayServer, job: str, trainer: FollowedTrainer) -> None:
    etag = newest(near, job, 0)[1]["etag"]
    connection = http.client.HTTPConnection(near.http_address, timeout=30)
    connection.connect()
    first = connection.sock
    for _ in range(20):
        connection.request("GET", f"/jobs/{job}/latest.safetensors", headers={"If-None-Match": etag})
        response = connection.getresponse()
        assert (response.status, response.read()) == (304, b"")
        assert connection.sock is first
    connection.close()


def test_a_client_that_takes_nothing_is_cut_off_and_one_that_asks_nothing(
    shared: Cluster, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ServerConfig(limits=replace(DEFAULTS, stall_seconds=1.0))
    with shared.connect("sync", job=job) as session, relay(shared.address, server, http_port=0) as near:
        FollowedTrainer(session, bucket_bytes=2**20, width=100_000)  # 16 MB: more than sockets hold
        newest(near, job, 0, "HEAD")  # this client may be slow, too
        followed = near.relayed.followed()[0]
        holds, held = followed.hold, threading.Event()
        monkeypatch.setattr(followed, "hold", lambda *given: (holds(*given), held.set())[0])
        host, port = near.http_address.split(":")
        with monkeypatch.context() as patch, socket.create_connection((host, int(port)), 60) as idle:
            patch.setattr(downloads, "IDLE_SECONDS", 0.3)
            assert idle.recv(1) == b"", "it asked for nothing"
        with socket.socket() as stuck:
            stuck.settimeout(60)
            stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # before it connects: it is never more
            stuck.connect((host, int(port)))
            stuck.sendall(f"GET /jobs/{job}/latest.safetensors HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert held.wait(60), "that it counts as a reader"
            until(lambda: not followed.callers(), "that it does not any more")


def test_downloads_have_the_roles_of_feeds(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    lines = (f"reader:own own{SECRET}", f"reader:other other{SECRET}", f"worker worker{SECRET}", f"cluster c{SECRET}")
    tokens.write_text("\n".join(lines))
    (tmp_path / "worker").write_text(f"worker{SECRET}")
    for each in tmp_path.iterdir():
        each.chmod(0o600)
    running = Cluster(shards=1, tokens=tokens)
    try:
        with (
            running.connect("sync", job="own", token_file=str(tmp_path / "worker")) as session,
            relay(running.address, ServerConfig(tokens=tokens), http_port=0) as near,
        ):
            FollowedTrainer(session)
            path = "/jobs/own/latest.safetensors"
            until(lambda: ask(near, path, authorization=f"Bearer own{SECRET}")[0] == 200, "the first edition")
            status, headers, _ = ask(near, path)
            assert (status, headers["www-authenticate"]) == (401, "Bearer")
            assert ask(near, path, authorization=f"Bearer wrong{SECRET}")[0] == 401
            assert ask(near, path, authorization="Basic b3duOm93bg==")[0] == 401
            status, _, text = ask(near, path, authorization=f"Bearer other{SECRET}")
            assert (status, "for job other only" in text.decode()) == (403, True)
            for shown, more in ((f"wrong{SECRET}", "close"), (f"other{SECRET}", "close"), (f"own{SECRET}", None)):
                assert ask(near, path, authorization=f"Bearer {shown}")[1].get("connection") == more
    finally:
        running.stop()


def test_downloads_have_the_certificates_of_servers(tmp_path: Path) -> None:
    dev_certs.write(tmp_path, ["127.0.0.1", "localhost"])
    server = tls(tmp_path / "server.pem", tmp_path / "server.key", tmp_path / "ca.pem")
    with relay("127.0.0.1:1", ServerConfig(tls=server), http_port=0) as near:
        host, port = near.http_address.split(":")
        context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        with pytest.raises((ssl.SSLError, ConnectionError)):
            _get(http.client.HTTPSConnection(host, int(port), context=context, timeout=30))
        context.load_cert_chain(tmp_path / "reader.pem", tmp_path / "reader.key")
        assert _get(http.client.HTTPSConnection(host, int(port), context=context, timeout=30)) == 404


def _get(connection: http.client.HTTPSConnection) -> int:
    try:
        connection.request("GET", "/")
        return connection.getresponse().status
    finally:
        connection.close()


def damaged(seeds: list[bytes], count: int) -> Iterator[bytes]:
    """Requests with bytes replaced, removed or put in; the same in each run."""
    chance = random.Random(1)
    for number in range(count):
        yield _damage(seeds[number % len(seeds)], chance.randbytes(3 * chance.randint(1, 6)))


def test_damaged_requests_of_feeds_are_refused_and_readers_go_on(
    near: RelayServer, job: str, trainer: FollowedTrainer
) -> None:
    """An answer of INTERNAL, and what `_no_surprises` finds in the log, would be a fault."""
    with ps.subscribe(near.address, job) as feed, open_channel(near.address) as channel:
        run = feed.wait_for().run
        service = f"/{feed_pb2.DESCRIPTOR.services_by_name['FeedService'].full_name}"
        describe = channel.unary_unary(f"{service}/DescribeWeights")
        pull = channel.unary_stream(f"{service}/PullEdition")
        asked = feed_pb2.DescribeWeightsRequest(job=job, run=run, with_spec=True).SerializeToString()
        whole = feed_pb2.PullEditionRequest(job=job, run=run, buckets=[0, 1], base_versions={0: 0, 1: 2**63})
        seeds = [asked, whole.SerializeToString(), *SEEDS["DescribeWeights"], *SEEDS["PullEdition"]]
        codes = set()
        for raw in damaged(seeds, 150):
            try:
                describe(raw, timeout=5)
            except grpc.RpcError as error:
                codes.add(error.code())
            try:
                list(pull(raw, timeout=0.2))
            except grpc.RpcError as error:
                codes.add(error.code())
        assert grpc.StatusCode.INTERNAL not in codes
        assert {grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT} <= codes
        last = trainer.steps(1)
        assert trainer.has(feed.wait_for(last).state_dict(), last)


def test_damaged_downloads_are_answered_or_cut_off_and_others_go_on(
    near: RelayServer, job: str, trainer: FollowedTrainer
) -> None:
    newest(near, job, 0)
    host, port = near.http_address.split(":")
    text = f"GET /jobs/{job}/latest.safetensors?wire=float32 HTTP/1.1\r\nHost: localhost\r\nRange: bytes=0-99\r\n"
    for raw in damaged([f"{text}Connection: close\r\n\r\n".encode()], 150):
        with socket.create_connection((host, int(port)), 30) as connection:
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(65536)
            assert not answer or re.match(rb"HTTP/1\.1 (200|206|304|400|403|404|405|416|429|503) ", answer), raw
    assert newest(near, job, 0)[0] == 200
