"""Memory shared between a worker and the shards on its host: who may map what, and what is left behind."""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ps_protocol.errors import NonFiniteGradient, NotShared
from ps_protocol.handover import NONCE_BYTES, SOCKET_PREFIX
from ps_protocol.job import JobSpec
from ps_protocol.layout import ParameterSpec, PiecePlace, bucket_layout
from ps_protocol.messages.data import PullCall
from ps_protocol.modes import Consistency
from ps_protocol.segment_layout import (
    PAGE_BYTES,
    SegmentMap,
    SegmentOffer,
    SegmentPlan,
    segment_plan,
)
from ps_protocol.tensors import TORCH_DTYPES
from ps_runtime import local_sockets
from ps_runtime.memory import free_bytes
from ps_server.shard import segments
from ps_server.shard.hosted_job import HostedJob
from ps_server.shard.segments import attach
from ps_server.shard.waiting import Pull
from ps_worker.cluster import shared_memory
from ps_worker.cluster.local_segment import LocalSegment
from ps_worker.model.buffers import FlatBuffers
from tests.tools.cases import crossed
from tests.tools.cluster import Cluster, until

MakeCluster = Callable[..., Cluster]
SEALED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
NONCE = bytes(range(NONCE_BYTES))
NAME = SOCKET_PREFIX + "0" * 32
STRANGER = 65534  # a user that is not this one
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")


@pytest.fixture
def plan() -> SegmentPlan:
    """Of a job with one parameter of 1000 floats."""
    parameter = ParameterSpec("w", (1000,), "float32", 0)
    spec = JobSpec("job", (parameter,), "SGD", ({"lr": 1.0},), Consistency(0, True), 1024, 1)
    return segment_plan(bucket_layout(spec.parameters, spec.bucket_bytes))


def test_each_member_of_a_group_has_a_segment_of_its_own_spaces() -> None:
    """As large as the largest needs: 2 pages for each of gradients and weights, after one for the nonce."""
    parameters = [
        ParameterSpec("w", (rows, 1000), "float32", 0, member=member, piece=PiecePlace((3, 1000), (first, 0)))
        for member, (first, rows) in enumerate([(0, 2), (2, 1)])
    ]
    plan = segment_plan(bucket_layout(parameters, 1024))
    assert plan.gradients.keys() == plan.weights.keys() == {"float32", "float32@1"}
    assert {region.offset for region in plan.gradients.values()} == {PAGE_BYTES}
    assert [plan.weights[space].offset for space in ("float32", "float32@1")] == [3 * PAGE_BYTES, 2 * PAGE_BYTES]
    assert plan.size == 5 * PAGE_BYTES


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A shared directory whose path is longer than a socket's address may be."""
    path = tmp_path / ("d" * 120)
    path.mkdir()
    return path


# What other threads of this process open and close meanwhile: those of a hidden segment, of gRPC, of servers.
OF_OTHERS = ("socket:", "pipe:", "anon_inode:", "/proc/", "/sys/")


def open_files() -> Counter[tuple[str, int]]:
    """What this process has open, of all that could be a segment, by name and inode."""
    files = Counter[tuple[str, int]]()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            path = f"/proc/self/fd/{descriptor}"
            files[os.readlink(path), os.stat(path).st_ino] += 1
    return Counter({file: count for file, count in files.items() if not file[0].startswith(OF_OTHERS)})


def opened_since(before: Counter[tuple[str, int]]) -> list[str]:
    """What is open that was not. What earlier tests have left to threads of servers may be closed meanwhile."""
    return sorted(name for name, _ in (open_files() - before).elements())


def test_both_ends_see_the_same_memory_and_nothing_is_left_of_the_handover(plan: SegmentPlan, directory: Path) -> None:
    before = open_files()
    with LocalSegment(plan.size, directory) as segment:
        there = SegmentMap(attach(segment.offer, plan.size, directory), plan)
    here = SegmentMap(segment.memory, plan)
    here.gradients["float32"][:1000] = 3.0
    there.weights["float32"][:1000] = there.gradients["float32"][:1000] + 1
    assert torch.equal(here.weights["float32"][:1000], torch.full((1000,), 4.0))
    assert torch.equal(there.gradients["float32"][:1000], torch.full((1000,), 3.0)), "they do not overlap"
    assert segment.memory[:NONCE_BYTES] == segment.offer.nonce
    assert list(directory.iterdir()) == []
    assert opened_since(before) == ["/memfd:ps-torch (deleted)"] * 2, "one in each mapping"


def test_several_shards_attach_the_same_segment_at_once(plan: SegmentPlan, directory: Path) -> None:
    with LocalSegment(plan.size, directory) as segment:
        maps = [SegmentMap(attach(segment.offer, plan.size, directory), plan) for _ in range(3)]
    maps[0].gradients["float32"][7] = 5.0
    assert [each.gradients["float32"][7] for each in maps] == [5.0] * 3


# -- what a shard refuses to map -------------------------------------------------------------------------------------

Give = Callable[[socket.socket, SegmentPlan, Path], None]


@contextlib.contextmanager
def giver(directory: Path, plan: SegmentPlan, give: Give, backlog: int = 8) -> Iterator[SegmentOffer]:
    """A socket at which one process is given something else than it should be."""
    with socket.socket(socket.AF_UNIX) as listener:
        os.fchmod(listener.fileno(), 0o600)
        folder = os.open(directory, os.O_PATH)
        listener.bind(f"/proc/self/fd/{folder}/{NAME}")
        os.close(folder)
        listener.listen(backlog)

        def serve() -> None:
            with contextlib.suppress(OSError):  # nobody came
                connection, _ = listener.accept()
                with connection:
                    assert connection.recv(NONCE_BYTES, socket.MSG_WAITALL) == NONCE
                    give(connection, plan, directory)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield SegmentOffer(NAME, (directory / NAME).lstat().st_ino, NONCE)
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def send(connection: socket.socket, content: bytes, *descriptors: int) -> None:
    """Sends them in one message, and closes them here."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    connection.sendmsg([content], ancillary)
    for descriptor in descriptors:
        os.close(descriptor)


def memory_file(size: int, seals: int = SEALED, nonce: bytes = NONCE, allocated: bool = True, flags: int = 0) -> int:
    descriptor = os.memfd_create("ps-torch", os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(descriptor, size)
    if allocated:
        os.posix_fallocate(descriptor, 0, size)
    if not flags:
        os.pwrite(descriptor, nonce, 0)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def file_of(directory: Path, plan: SegmentPlan) -> int:
    (directory / "file").write_bytes(NONCE + bytes(plan.size - NONCE_BYTES))
    return os.open(directory / "file", os.O_RDWR)


def tmpfs_file(plan: SegmentPlan) -> int:
    """As shared memory was once handed over: it can be cut short at any time."""
    path = Path("/dev/shm") / (SOCKET_PREFIX + os.urandom(16).hex())
    path.write_bytes(NONCE + bytes(plan.size - NONCE_BYTES))
    try:
        return os.open(path, os.O_RDWR)
    finally:
        path.unlink()


def read_only(plan: SegmentPlan) -> int:
    descriptor = memory_file(plan.size)
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
    finally:
        os.close(descriptor)


GIVEN: dict[str, tuple[Give, str]] = {
    "nothing": (lambda to, plan, path: None, "was closed"),
    "garbage": (lambda to, plan, path: send(to, b"xx"), "zero byte with one descriptor, got b'xx' with 0"),
    "no descriptor": (lambda to, plan, path: send(to, b"\0"), "zero byte with one descriptor, got .* with 0"),
    "two descriptors": (
        lambda to, plan, path: send(to, b"\0", memory_file(plan.size), memory_file(plan.size)),
        "zero byte with one descriptor, got .* with 2",
    ),
    "a hundred descriptors": (
        lambda to, plan, path: send(to, b"\0", *(memory_file(4096) for _ in range(100))),
        "zero byte with one descriptor, got .* with 2",
    ),
    "another byte": (lambda to, plan, path: send(to, b"\1", memory_file(plan.size)), "zero byte with one descriptor"),
    "more bytes": (lambda to, plan, path: send(to, b"\0\0", memory_file(plan.size)), "zero byte with one descriptor"),
    "a file": (lambda to, plan, path: send(to, b"\0", file_of(path, plan)), "memory file"),
    "a file of a tmpfs": (lambda to, plan, path: send(to, b"\0", tmpfs_file(plan)), "sealed against shrinking"),
    "a directory": (lambda to, plan, path: send(to, b"\0", os.open(path, os.O_RDONLY)), "no memory file"),
    "a pipe": (lambda to, plan, path: send(to, b"\0", os.open("/dev/zero", os.O_RDWR)), "no memory file"),
    "one that may shrink": (
        lambda to, plan, path: send(to, b"\0", memory_file(plan.size, fcntl.F_SEAL_GROW)),
        "sealed against shrinking",
    ),
    "one that cannot be written": (lambda to, plan, path: send(to, b"\0", read_only(plan)), "reading and writing"),
    "one sealed against writing": (
        lambda to, plan, path: send(to, b"\0", memory_file(plan.size, SEALED | fcntl.F_SEAL_WRITE)),
        "reading and writing",
    ),
    "a smaller one": (
        lambda to, plan, path: send(to, b"\0", memory_file(plan.size - 4096)),
        "has 8192 bytes where 12288 are needed",
    ),
    "a larger one": (
        lambda to, plan, path: send(to, b"\0", memory_file(plan.size + 4096)),
        "has 16384 bytes where 12288 are needed",
    ),
    "one with holes": (
        lambda to, plan, path: send(to, b"\0", memory_file(plan.size, allocated=False)),
        "allocate all",
    ),
    "another segment": (
        lambda to, plan, path: send(to, b"\0", memory_file(plan.size, nonce=bytes(NONCE_BYTES))),
        "are not the nonce",
    ),
    "huge pages": (
        lambda to, plan, path: send(
            to, b"\0", memory_file(2**21, fcntl.F_SEAL_SHRINK, allocated=False, flags=os.MFD_HUGETLB)
        ),
        "has pages of 2097152 bytes",
    ),
}


def test_what_the_contract_says_byte_by_byte_is_taken(plan: SegmentPlan, directory: Path) -> None:
    """Without a line of the worker's: see AttachSegmentRequest in data.proto."""
    with giver(directory, plan, lambda to, plan, path: send(to, b"\0", memory_file(plan.size))) as offer:
        segment = SegmentMap(attach(offer, plan.size, directory), plan)
    assert torch.equal(segment.gradients["float32"][:1000], torch.zeros(1000))


@pytest.mark.parametrize(("give", "says"), GIVEN.values(), ids=GIVEN.keys())
def test_what_is_no_segment_of_this_job_is_refused_and_nothing_of_it_is_kept(
    plan: SegmentPlan, directory: Path, give: Give, says: str
) -> None:
    before = open_files()
    with giver(directory, plan, give) as offer, pytest.raises(NotShared, match=says):
        attach(offer, plan.size, directory)
    assert opened_since(before) == []


def test_a_worker_that_sends_nothing_is_not_waited_for(
    plan: SegmentPlan, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "HANDOVER_SECONDS", 0.1)
    given_up = threading.Event()
    with giver(directory, plan, lambda *_: given_up.wait(30.0) and None) as offer:
        with pytest.raises(NotShared, match=r"gave nothing for 0.1 s"):
            attach(offer, plan.size, directory)
        given_up.set()


def test_a_socket_with_too_many_callers_is_refused_at_once(plan: SegmentPlan, directory: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as stack:
        os.fchmod(listener.fileno(), 0o600)
        monitored = os.open(directory, os.O_PATH)
        listener.bind(f"/proc/self/fd/{monitored}/{NAME}")
        os.close(monitored)
        listener.listen(1)
        file = stack.enter_context(local_sockets.opened(directory, NAME))
        for _ in range(2):
            stack.enter_context(local_sockets.connect(file, 1.0))
        with pytest.raises(NotShared, match="temporarily unavailable"):
            attach(SegmentOffer(NAME, os.fstat(file).st_ino, NONCE), plan.size, directory)


# -- what a shard refuses to connect to ------------------------------------------------------------------------------


def link(path: Path) -> None:
    (path / "socket").touch()
    (path / NAME).symlink_to(path / "socket")


def bound(path: Path, mode: int = 0o600) -> None:
    """A socket at which nobody listens."""
    with socket.socket(socket.AF_UNIX) as dead:
        folder = os.open(path, os.O_PATH)
        dead.bind(f"/proc/self/fd/{folder}/{NAME}")
        os.close(folder)
    (path / NAME).chmod(mode)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "No such file"),
        (lambda path: (path / NAME).write_bytes(bytes(12288)), "must be a unix socket"),
        (lambda path: (path / NAME).mkdir(mode=0o700), "must be a unix socket"),
        (lambda path: os.mkfifo(path / NAME, 0o600), "must be a unix socket"),
        (link, "must be a unix socket"),
        (lambda path: bound(path, 0o666), "this process' user alone"),
        (bound, "Connection refused"),
    ],
    ids=["nothing", "file", "directory", "pipe", "link", "one that others can reach", "one of a dead process"],
)
def test_a_shard_connects_to_nothing_but_sockets_of_its_user(
    plan: SegmentPlan, directory: Path, make: Callable[[Path], None], says: str
) -> None:
    make(directory)
    inode = next((path.lstat().st_ino for path in directory.glob(NAME)), 0)
    with pytest.raises(NotShared, match=says):
        attach(SegmentOffer(NAME, inode, NONCE), plan.size, directory)


@pytest.mark.parametrize("name", ["../" + NAME, "/" + NAME, "1/2", NAME + "\n", NAME.upper(), "", "x" * 5000])
def test_a_location_is_a_bare_name(plan: SegmentPlan, directory: Path, name: str) -> None:
    with pytest.raises(NotShared, match="32 hexadecimal digits"):
        attach(SegmentOffer(name, 1, NONCE), plan.size, directory)


@pytest.mark.parametrize("nonce", [b"", NONCE[1:], NONCE + b"0"])
def test_a_nonce_has_32_bytes(plan: SegmentPlan, directory: Path, nonce: bytes) -> None:
    with pytest.raises(NotShared, match="has 32 bytes"):
        attach(SegmentOffer(NAME, 1, nonce), plan.size, directory)


def test_a_socket_that_another_process_has_put_in_the_place_of_the_workers_learns_nothing(
    plan: SegmentPlan, directory: Path
) -> None:
    with LocalSegment(plan.size, directory) as segment:
        path = directory / segment.offer.location
        path.rename(directory / "moved")
        reached = threading.Event()
        with giver(directory, plan, lambda *_: reached.set()):
            (directory / NAME).rename(path)
            with pytest.raises(NotShared, match="is another one: it has inode"):
                attach(segment.offer, plan.size, directory)
        assert not reached.is_set()


SERVER = """
import os, socket, sys
if len(sys.argv) > 2:
    os.setgid(int(sys.argv[2]))
    os.setuid(int(sys.argv[2]))
listener = socket.socket(socket.AF_UNIX)
os.fchmod(listener.fileno(), 0o600)
listener.bind(sys.argv[1])
listener.listen(1)
print("ready", flush=True)
sys.stdin.read()
"""


@root_only
@pytest.mark.parametrize(
    ("owner", "says"),
    [(STRANGER, "this process' user alone"), (os.geteuid(), "is served by another user")],
    ids=["owned by them", "given to this user"],
)
def test_a_socket_that_another_user_serves_is_refused(plan: SegmentPlan, owner: int, says: str) -> None:
    with open_directory() as directory:
        path = directory / NAME
        command = [sys.executable, "-c", SERVER, str(path), str(STRANGER)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            os.chown(path, owner, owner)
            with pytest.raises(NotShared, match=says):
                attach(SegmentOffer(NAME, path.lstat().st_ino, NONCE), plan.size, directory)
            child.communicate()


@contextlib.contextmanager
def open_directory() -> Iterator[Path]:
    """A directory like /dev/shm, into which every user may write."""
    directory = Path("/dev/shm") / f"test-{os.urandom(8).hex()}"
    directory.mkdir()
    directory.chmod(0o1777)
    try:
        yield directory
    finally:
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()


# -- what a worker hands over, and to which processes ----------------------------------------------------------------


def ask(segment: LocalSegment, directory: Path, nonce: bytes) -> int:
    """How many descriptors a process that shows this nonce is given."""
    with local_sockets.opened(directory, segment.offer.location) as file, local_sockets.connect(file, 20.0) as peer:
        peer.sendall(nonce)
        peer.shutdown(socket.SHUT_WR)
        try:
            _, descriptors, _, _ = socket.recv_fds(peer, 1, 1)
        except ConnectionResetError:  # not all was read
            return 0
        for descriptor in descriptors:
            os.close(descriptor)
        return len(descriptors)


def test_a_process_that_does_not_know_the_nonce_gets_nothing(plan: SegmentPlan, directory: Path) -> None:
    with LocalSegment(plan.size, directory) as segment:
        for nonce in (b"", bytes(NONCE_BYTES), segment.offer.nonce[:-1], b"x" + segment.offer.nonce):
            assert ask(segment, directory, nonce) == 0
        assert ask(segment, directory, segment.offer.nonce) == 1
        with pytest.raises(NotShared, match="was closed"):
            attach(SegmentOffer(segment.offer.location, segment.offer.socket_inode, NONCE), plan.size, directory)


def test_processes_that_connect_and_say_nothing_keep_no_shard_out(plan: SegmentPlan, directory: Path) -> None:
    with LocalSegment(plan.size, directory) as segment, contextlib.ExitStack() as stack:
        file = stack.enter_context(local_sockets.opened(directory, segment.offer.location))
        for _ in range(3):
            stack.enter_context(local_sockets.connect(file, 1.0))
        assert isinstance(attach(segment.offer, plan.size, directory), mmap.mmap)


def test_a_hidden_segment_is_handed_to_no_process(plan: SegmentPlan, directory: Path) -> None:
    segment = LocalSegment(plan.size, directory)
    with local_sockets.opened(directory, segment.offer.location) as file, local_sockets.connect(file, 20.0) as peer:
        segment.hide()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            peer.sendall(segment.offer.nonce)
            assert socket.recv_fds(peer, 1, 1)[:2] == (b"", [])
        with pytest.raises(ConnectionRefusedError):
            local_sockets.connect(file, 1.0)


def test_the_memory_is_there_at_once_and_can_neither_shrink_nor_grow(plan: SegmentPlan, directory: Path) -> None:
    with LocalSegment(plan.size, directory) as segment:
        descriptor = segment._descriptor
        assert os.fstat(descriptor).st_blocks * 512 == plan.size
        for size in (0, plan.size - 4096, plan.size + 4096):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


@root_only
def test_another_user_cannot_connect_to_a_workers_socket_nor_take_its_name(plan: SegmentPlan) -> None:
    script = """
import os, socket, sys
path, user = sys.argv[1], int(sys.argv[2])
os.setgid(user)
os.setuid(user)
for act in (socket.socket(socket.AF_UNIX).connect, os.unlink, lambda path: os.rename(path, path + "x")):
    try:
        act(path)
    except PermissionError:
        print("refused")
"""
    with open_directory() as directory, LocalSegment(plan.size, directory) as segment:
        command = [sys.executable, "-c", script, str(directory / segment.offer.location), str(STRANGER)]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        assert ran.stdout.split() == ["refused"] * 3
        assert isinstance(attach(segment.offer, plan.size, directory), mmap.mmap)


def test_a_directory_without_room_for_a_socket_is_named(plan: SegmentPlan, directory: Path) -> None:
    with pytest.raises(NotShared, match=r"no socket can be made in .*/missing \(No such file"):
        LocalSegment(plan.size, directory / "missing")
    assert list(directory.iterdir()) == []


def test_a_segment_larger_than_memory_is_refused_before_the_kernel_kills_for_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if free_bytes() is None:
        pytest.skip("this system does not say how much memory is free")
    # Should the check be gone, the test fails here and the machine lives.
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("more than there is was asked for"))
    with pytest.raises(NotShared, match=rf"no room for a memory file of {2**50} bytes: \d+ are free"):
        LocalSegment(2**50, directory)
    assert list(directory.iterdir()) == []


def test_memory_that_the_kernel_refuses_is_no_error_of_the_script(
    plan: SegmentPlan, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = open_files()
    with pytest.raises(NotShared, match=r"no memory file of 12288 bytes can be made \(No space"):
        LocalSegment(plan.size, directory)
    assert opened_since(before) == []


def test_a_name_that_another_process_has_taken_is_noticed(directory: Path) -> None:
    command = [sys.executable, "-c", SERVER, NAME]
    with subprocess.Popen(command, cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        with pytest.raises(FileExistsError):
            local_sockets._own_inode(directory, NAME)
        with pytest.raises(OSError, match="in use") as refused:
            local_sockets.listen(directory, NAME, 1)
        assert refused.value.errno == errno.EADDRINUSE
        child.communicate()
    assert (directory / NAME).exists(), "it is another's"


def test_sockets_of_workers_that_were_killed_are_removed_and_those_of_living_ones_are_not(
    plan: SegmentPlan, directory: Path
) -> None:
    bound(directory)
    recent, file = directory / (SOCKET_PREFIX + "1" * 32), directory / (SOCKET_PREFIX + "2" * 32)
    (directory / NAME).rename(recent)
    bound(directory)
    file.touch(mode=0o600)
    with LocalSegment(plan.size, directory) as living:
        for path in (directory / NAME, file, directory / living.offer.location):
            os.utime(path, (0, 0))
        with LocalSegment(plan.size, directory) as newest:
            names = {path.name for path in directory.iterdir()}
            assert names == {recent.name, file.name, living.offer.location, newest.offer.location}
            assert isinstance(attach(living.offer, plan.size, directory), mmap.mmap)


# -- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wire", "transport"), crossed(["float32", "bfloat16", "float16"], ["shm", "tcp", "grpc"]))
def test_every_transport_and_wire_format_trains_alike(shared: Cluster, job: str, transport: str, wire: str) -> None:
    """One worker: what differs from plain PyTorch is the rounding of the wire, 8 bits of precision in bfloat16.

    In shared memory nothing travels, and nothing is rounded.
    """
    plain = nn.Linear(16, 8)
    model = nn.Linear(16, 8)
    model.load_state_dict(plain.state_dict())
    data = torch.randn(20, 32, 16)
    with shared.connect("sync", job=job, transport=transport) as session:
        ours, optimizer = session.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            bucket_bytes=128,
            gradient_wire=wire,
            weight_wire=wire,
        )
        reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        for batch in data:
            for net, stepper in ((ours, optimizer), (plain, reference)):
                net(batch).square().mean().backward()
                stepper.step()
                stepper.zero_grad()
    tolerance = {"float32": 1e-6, "bfloat16": 2e-2, "float16": 2e-3}[wire if transport != "shm" else "float32"]
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_what_overflows_on_the_way_is_refused_by_the_shard(shared: Cluster, job: str, transport: str) -> None:
    """The worker has looked at float32, where it is finite; what travels is not."""
    model = nn.Linear(4, 4)
    with shared.connect("sync", job=job, transport=transport) as session:
        ours, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), gradient_wire="float16")
        (ours(torch.ones(1, 4)).sum() * 1e6).backward()
        with pytest.raises(NonFiniteGradient):
            optimizer.step()


LENDER = """
import sys, torch, ps_worker
vector = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(64))])
session = ps_worker.connect(sys.argv[1], "sync", job="lent", rank=1, world_size=2, transport="shm")
vector, optimizer = session.prepare(vector, torch.optim.SGD(vector.parameters(), lr=1.0), bucket_bytes=64)
vector[0].grad = torch.full((64,), -2.0)
optimizer.step()
"""


@pytest.mark.long
def test_a_worker_killed_while_shards_read_its_segment_leaves_what_it_pushed(make_cluster: MakeCluster) -> None:
    """Its gradient lies in its own memory, held back for rank 0's, which comes when its worker is gone."""
    cluster = make_cluster(shards=2, lease=5.0)
    vector = nn.ParameterList([nn.Parameter(torch.zeros(64))])
    command = [sys.executable, "-c", LENDER, cluster.address]
    with (
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child,
        cluster.connect("sync", 0, 2, job="lent", transport="shm") as session,
    ):
        try:
            vector, optimizer = session.prepare(vector, torch.optim.SGD(vector.parameters(), lr=1.0), bucket_bytes=64)
            until(lambda: _staged(cluster) == 64 * 4, "all of the other's gradient")
        finally:
            child.kill()
            child.wait()
        vector[0].grad = torch.full((64,), -4.0)
        optimizer.step()
        assert torch.equal(vector[0].detach(), torch.full((64,), 3.0)), "the mean of both"
        until(lambda: _lent(cluster) == {0}, "the end of the other's lease")


def _staged(cluster: Cluster) -> int:
    jobs = [shard.jobs().get("lent") for shard in cluster.shards]
    return sum(job.partition.staged_bytes for job in jobs if job is not None)


def _lent(cluster: Cluster) -> set[int]:
    """The ranks whose segments shards map."""
    return {rank for shard in cluster.shards for rank, _ in shard.jobs()["lent"].of_workers.segments}


def test_where_shards_cannot_see_the_memory_shm_is_refused_and_auto_takes_the_network(
    shared: Cluster, job: str, tmp_path: Path
) -> None:
    # As a worker on another host sees it: a directory that is not the shards'.
    model = nn.Linear(2, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    place = {"job": job, "shared_directory": str(tmp_path)}
    with shared.connect("sync", transport="shm", **place) as session, pytest.raises(NotShared):
        session.prepare(model, plain)
    with shared.connect("sync", transport="auto", **place) as session:
        ours, optimizer = session.prepare(model, plain)
        ours(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert session.clock == 1
    assert list(tmp_path.iterdir()) == []


def apart(buffers: FlatBuffers, space: str, dtype: str, shared: object) -> torch.Tensor:
    """The buffer of a space, beside the segment."""
    return torch.zeros(buffers.layout.space_sizes[space], dtype=TORCH_DTYPES[dtype])


@pytest.mark.parametrize(("lies_there", "notify_bytes"), [(True, 0), (False, 64)])
def test_a_worker_is_told_of_weights_early_only_where_it_has_to_take_them_over(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, lies_there: bool, notify_bytes: int
) -> None:
    """As from a GPU, whose model does not lie in the segment."""
    monkeypatch.setattr(shared_memory, "NOTIFY_BYTES", 64)  # one bucket: a notice for each, in the middle of a pull
    cluster = make_cluster(shards=1)
    if not lies_there:
        monkeypatch.setattr(FlatBuffers, "_space", apart)
    asked = []
    check = cluster.shards[0]._pulls.check

    def checked(job: HostedJob, call: PullCall, *more: Any, **known: bool) -> Pull:
        asked.append((call.in_segment, call.notify_bytes))
        return check(job, call, *more, **known)

    monkeypatch.setattr(cluster.shards[0]._pulls, "check", checked)
    with cluster.connect("sync", transport="shm") as session:
        model = nn.Linear(16, 8, bias=False)
        model.weight.data.zero_()
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), bucket_bytes=64)
        asked.clear()  # of initial values, which always come over the network
        for _ in range(3):
            model(torch.ones(1, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(model.weight, torch.full((8, 16), -3.0))
    assert set(asked) == {(True, notify_bytes)}
