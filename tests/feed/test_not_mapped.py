"""Where a shard's memory cannot be mapped, or may not be any more, its readers get messages, or are told."""

from __future__ import annotations

import errno
import gc
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ps_torch as ps
from ps_feed.mapping import HandedOver, Handover
from ps_protocol.errors import NotShared, Unauthenticated
from tests.tools.cluster import Cluster, until
from tests.tools.feeding import BUCKETS, CELLS, Feeding
from tests.tools.followed_trainer import FollowedTrainer
from tests.tools.launching import environment
from tests.tools.remembering_trainer import in_background
from tests.tools.rollbacks import QUICK

SECRET = "0123456789abcdef" * 2
STRANGER = 65534  # a user that is not this one
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user and to mount")


def payload_bytes(feed: ps.WeightFeed) -> int:
    return feed._subscription.received.nbytes


def held(cluster: Cluster, job: str) -> int:
    """The bytes that readers have mapped."""
    files = cluster.shards[0].weight_feeds._mapped.get((job, "float32"))
    return files.look() or files.held_bytes() if files is not None else 0


# A process that reads one edition, without torch, whose import takes seconds. Its words: server, job, and the user that
# it becomes.
READER = """
import os, pathlib, sys
from ps_feed.subscription import Subscription
if len(sys.argv) > 3:
    os.setgid(int(sys.argv[3]))
    os.setuid(int(sys.argv[3]))
directory = pathlib.Path(os.environ["PS_SHARED_DIRECTORY"])
with Subscription(sys.argv[1], sys.argv[2], shared_directory=directory) as feed:
    print(feed.wait().version, feed.received.nbytes > 0)
"""


def read_by(*command: str) -> str:
    """What a reader in another process prints: the version that it has, and whether it came in messages."""
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment())
    return ran.stdout.strip()


@pytest.fixture
def open_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory like /dev/shm, into which every user may write."""
    with tempfile.TemporaryDirectory(prefix="test-", dir="/dev/shm") as name:
        Path(name).chmod(0o1777)
        monkeypatch.setenv("PS_SHARED_DIRECTORY", name)
        yield Path(name)


@root_only
def test_a_reader_of_another_user_gets_messages_and_the_shard_says_why(
    job: str, open_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster(1, shared_directory=open_directory)
    try:
        with cluster.connect("sync", job=job) as session:
            FollowedTrainer(session).steps(2)
            assert read_by(sys.executable, "-c", READER, cluster.address, job, str(STRANGER)) == "2 True"
            assert held(cluster, job) == 0
    finally:
        cluster.stop()
    assert "get editions in messages, and not as memory: the socket" in caplog.text
    assert "must be a unix socket of this process' user alone" in caplog.text


@root_only
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs `unshare`, of util-linux")
def test_a_reader_in_a_container_with_a_directory_of_its_own_gets_messages(
    alone: Cluster, job: str, trained: FollowedTrainer, here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It has the host's name, network and paths, and another file system at the path of the shared directory."""
    mount = ["unshare", "--mount", "--propagation", "private", "sh", "-c", f'mount -t tmpfs none {here} && exec "$@"']
    can = subprocess.run([*mount, "sh", "true"], capture_output=True, text=True, check=False)
    if can.returncode:
        pytest.skip(f"nothing can be mounted here: {can.stderr.strip()}")
    trained.steps(2)
    with caplog.at_level("INFO"):
        assert read_by(*mount, "sh", sys.executable, "-c", READER, alone.address, job) == "2 True"
    assert "in messages" not in caplog.text, "it is a reader elsewhere, which is no trouble"


def test_a_reader_that_leaves_gives_its_memory_back_and_maps_again_when_it_returns(
    alone: Cluster, job: str, trained: FollowedTrainer
) -> None:
    for _ in range(3):
        last = trained.step()
        with ps.subscribe(alone.address, job) as feed:
            edition = feed.wait_for(last)
            assert payload_bytes(feed) == 0
            assert held(alone, job) > 0
        assert trained.has(edition.state_dict(), last), "a closed feed leaves its editions"
        del edition, feed
        gc.collect()
        until(lambda: held(alone, job) == 0, "the shard to notice")


def test_a_reader_whose_shard_was_started_again_maps_what_the_new_one_has(job: str, here: Path, tmp_path: Path) -> None:
    cluster = Cluster(shared_directory=here, checkpoint_dir=tmp_path, timing=QUICK)
    try:
        with cluster.connect("sync", job=job) as session, ps.subscribe(cluster.address, job) as feed:
            trainer = FollowedTrainer(session)
            trainer.steps(2)
            asked = in_background(lambda: cluster.coordinator.job(job).checkpoint())
            while asked.is_alive():
                trainer.step()
            asked.join()
            before = feed.wait_for(trainer.steps(2))
            weights = {name: each.clone() for name, each in before.state_dict().items()}
            cluster.start_again(1)
            trainer.step()
            until(lambda: feed.restores == 1, "the rollback")
            edition = feed.wait_for(session.clock)
            assert trainer.has(edition.state_dict(), edition.version)
            assert all(torch.equal(each, weights[name]) for name, each in before.state_dict().items())
            assert payload_bytes(feed) == 0
    finally:
        cluster.stop()


def test_a_reader_whose_token_is_withdrawn_keeps_what_it_has_mapped_and_is_told(
    job: str, here: Path, tmp_path: Path
) -> None:
    access = tmp_path / "tokens"
    access.write_text(f"reader reader{SECRET}\nworker worker{SECRET}\ncluster cluster{SECRET}\n")
    for name in ("reader", "worker"):
        (tmp_path / name).write_text(name + SECRET)
    for each in tmp_path.iterdir():
        each.chmod(0o600)
    cluster = Cluster(1, tokens=access, shared_directory=here)
    try:
        with (
            cluster.connect("sync", job=job, token_file=str(tmp_path / "worker")) as session,
            ps.subscribe(cluster.address, job, token_file=str(tmp_path / "reader")) as feed,
        ):
            trainer = FollowedTrainer(session)
            feed.wait_for(trainer.step())
            access.write_text(f"worker worker{SECRET}\ncluster cluster{SECRET}\n")

            def is_told() -> bool:
                trainer.step()
                return feed.trouble is not None

            until(is_told, "that its token is not known any more", every=0.1)
            with pytest.raises(Unauthenticated, match="bearer token is not known"):
                feed.wait_for(trainer.step())
            assert trainer.has(feed.state_dict(), feed.version)
            assert payload_bytes(feed) == 0
    finally:
        cluster.stop()


def test_a_reader_that_cannot_map_what_it_was_handed_says_so_and_gets_messages(
    alone: Cluster,
    job: str,
    trained: FollowedTrainer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def no_memory(*arguments: object, **more: object) -> Any:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr("ps_feed.mapping.mapped", no_memory)
    with ps.subscribe(alone.address, job) as feed:
        for _ in range(3):
            last = trained.step()
            assert trained.has(feed.wait_for(last).state_dict(), last)
        assert payload_bytes(feed) > 0
    said = [each.message for each in caplog.records if "in messages, also from servers on this host" in each.message]
    assert len(said) == 1
    assert re.search(r"file \d of the server cannot be mapped \(Cannot allocate memory\)", said[0])
    until(lambda: held(alone, job) == 0, "the shard to notice")


# -- one shard, by hand ------------------------------------------------------------------------------------------------


@contextmanager
def no_more_files() -> Iterator[None]:
    """A block in which this process can open nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as lowest:
        free = lowest.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def feeding(tmp_path: Path) -> Iterator[Feeding]:
    """A shard whose readers wait in the test's directory."""
    made = Feeding(directory=tmp_path).begin()
    yield made
    made.shard.weight_feeds.stop()


def taken_over(feeding: Feeding, waiting: HandedOver, version: int, wire: str = "float32") -> bool:
    """Takes an edition, all of which has to have that version. Returns whether it was handed over as memory."""
    buckets = feeding.pull(version, wire, offer=waiting.offer).buckets()
    assert [each.version for each in buckets] == [version] * BUCKETS
    dtype, handed = getattr(torch, wire), [each.lies is not None for each in buckets]
    for each in buckets:
        content: Any = each.payload
        if each.lies is not None:
            size = CELLS // BUCKETS * dtype.itemsize
            content = waiting.file(each.lies.file, 2**20)[each.lies.offset : each.lies.offset + size]
        assert torch.frombuffer(bytearray(content), dtype=dtype).tolist() == [float(version)] * (CELLS // BUCKETS)
    assert len(set(handed)) == 1
    return handed[0]


def test_a_shard_that_can_open_no_file_sends_messages_says_so_once_and_tries_again(
    feeding: Feeding, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with HandedOver(tmp_path) as waiting:
        with no_more_files():
            for version in range(2):
                assert not taken_over(feeding, waiting, version)
                feeding.step()
        said = [each.message for each in caplog.records]
        assert len(said) == 1
        assert "no memory file of 256 bytes can be made (Too many open files)" in said[0]
        assert not taken_over(feeding, waiting, 2), "it is tried again after a minute"
        feeding.shard.jobs()["job"].editions._new_files._again = 0.0
        feeding.step()
        assert taken_over(feeding, waiting, 3)


def test_a_reader_that_can_open_no_file_is_told_and_the_shard_forgets_what_it_had_handed_over(
    feeding: Feeding, tmp_path: Path
) -> None:
    handover = Handover(tmp_path, "job")
    with handover.offered(True) as waiting:
        assert waiting is not None
        buckets = feeding.pull(0, offer=waiting.offer).buckets()
        assert all(each.lies is not None for each in buckets)
        with no_more_files(), pytest.raises(NotShared, match=r"file 0 \(Too many open files\)") as error:
            waiting.file(0, 2**20)
    handover.failed(error.value)
    with handover.offered(True) as waiting:
        assert waiting is None, "it asks for messages"
    files = feeding.shard.weight_feeds._mapped["job", "float32"]
    assert (files.look(), files.held_bytes()) == (None, 0)


def test_readers_in_other_types_map_the_same_edition_each_in_its_own(feeding: Feeding, tmp_path: Path) -> None:
    wires = "float32", "bfloat16", "float16"
    for version in range(2):
        for wire in wires:  # the later ones come when what the first wants is copied
            with HandedOver(tmp_path) as waiting:
                assert taken_over(feeding, waiting, version, wire)
        [*_, edition] = feeding.shard.jobs()["job"].editions._kept
        assert edition.nbytes == CELLS * (4 + 2 + 2), "there is one copy in each type"
        feeding.step()
