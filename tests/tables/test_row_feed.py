"""A process that does not train has a table's rows as training has them, whatever happens to servers and itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import ps_worker
from ps_protocol.errors import Forbidden, InvalidRequest, NotFound, TryLater, Unreachable
from ps_protocol.messages.rows import FeedRoundBegin
from ps_protocol.tables import Initializer
from ps_server.core.limits import Limits
from ps_server.shard.row_feeds import ShardFeed
from ps_server.storage.checkpoints import CheckpointStore
from ps_worker.cluster.feeds import RowWatch, shard_addresses
from ps_worker.row_feed import RowFeed
from ps_worker.tables.row_copy import ReadRowsMessage, RowCopy, saved_copy
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, until
from tests.tools.rollbacks import QUICK

IDS = torch.cat([torch.arange(-50, 400), torch.tensor([2**62, -(2**63)])])


class Model(nn.Module):
    def __init__(self, **rows: object) -> None:
        super().__init__()
        self.rows = ps_worker.Embedding(3, initial="uniform", scale=0.1, seed=7, **rows)  # type: ignore[arg-type]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids).square().sum()  # type: ignore[no-any-return]


class Trainer:
    """A worker that trains a table, some ids a step."""

    def __init__(self, session: ps_worker.Session, **rows: object) -> None:
        self.session, self.own = session, Model(**rows)
        self._model, self._optimizer = session.prepare(self.own, torch.optim.Adagrad(self.own.parameters(), lr=0.1))

    def step(self) -> None:
        ids = torch.randint(0, 40, (20,)) + 3 * self.session.clock
        self._optimizer.zero_grad()
        self._model(ids).backward()
        self._optimizer.step()

    def steps(self, count: int) -> int:
        """Trains; the worker's clock then."""
        for _ in range(count):
            self.step()
        return self.session.clock

    def is_had_by(self, feed: RowFeed) -> bool:
        """Whether a feed has the rows as training has them."""
        return torch.equal(feed.rows(IDS), self.own.rows.rows(IDS)) and len(feed) == len(self.own.rows)


@pytest.fixture
def trainer(shared: Cluster, job: str) -> Iterator[Trainer]:
    with shared.connect("sync", job=job) as session:
        yield Trainer(session)


@pytest.mark.parametrize("rows", [{}, {"max_rows": 60}, {"expire_after": 16, "admit_after": 2}], ids=str)
def test_a_feed_has_the_rows_as_training_has_them(shared: Cluster, job: str, rows: dict[str, int]) -> None:
    with shared.connect("sync", job=job) as session, RowFeed("rows", shared.address, job, period=0.1) as feed:
        trainer = Trainer(session, **rows)
        for _ in range(4):
            clock = trainer.steps(15)
            assert feed.wait_for(clock) == clock
            assert trainer.is_had_by(feed)
        assert feed.age < 60
        assert feed.trouble is None
        with pytest.raises(Unreachable, match=r"table 'rows' did not come to version 1000: it is at 60"):
            feed.wait_for(1000, timeout=0.1)
    assert torch.equal(feed.rows(IDS.view(4, -1)), feed.rows(IDS).view(4, -1, 3)), "it stays readable when it is closed"
    with pytest.raises(InvalidRequest, match=r"ids are a tensor of int64 or int32, got torch.float32"):
        feed.rows(torch.rand(3))


def test_in_async_the_copy_is_the_table_once_training_rests(shared: Cluster, job: str) -> None:
    with shared.connect("async", job=job) as session, RowFeed("rows", shared.address, job, period=0.1) as feed:
        trainer = Trainer(session, max_rows=60)
        feed.wait_for(trainer.steps(30))
        assert trainer.is_had_by(feed)


def test_a_feed_that_is_started_again_begins_with_what_it_had(
    shared: Cluster, job: str, trainer: Trainer, tmp_path: Path
) -> None:
    with RowFeed("rows", shared.address, job, directory=tmp_path, period=0.1) as feed:
        feed.wait_for(trainer.steps(10))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"rows-{i}-of-2.safetensors" for i in range(2)]
    clock = trainer.steps(10)
    with RowFeed("rows", shared.address, job, directory=tmp_path, period=0.1) as again:
        assert again.version >= 10, "at once"
        again.wait_for(clock)
        assert trainer.is_had_by(again)
        assert not any(each.copy is None or each.copy.begin.full for each in again._serving), "only what changed came"
    with pytest.raises(InvalidRequest, match=r"has rows of table 'rows', and those of 'others' are asked for"):
        RowFeed("others", shared.address, job, directory=tmp_path)


def test_a_stream_ends_with_the_reason_where_a_shard_has_no_such_job_any_more(
    shared: Cluster, job: str, trainer: Trainer
) -> None:
    trainer.steps(3)
    addresses, _ = shard_addresses(shared.address)
    watch = iter(RowWatch(0, addresses[0], ps_worker.config.access(), job, "rows", b"", 0.1))  # type: ignore[attr-defined]
    assert next(watch).begin is not None
    shared.shards[0].drop_job(job)
    with pytest.raises(NotFound, match=f"job '{job}' ended"):
        list(watch)


def test_saved_rows_are_there_also_where_no_server_is(
    shared: Cluster, job: str, trainer: Trainer, tmp_path: Path
) -> None:
    with RowFeed("rows", shared.address, job, directory=tmp_path, period=0.1) as feed:
        feed.wait_for(trainer.steps(10))
        expected = feed.rows(IDS)
    with RowFeed("rows", "127.0.0.1:1", job, directory=tmp_path) as alone:
        assert alone.version == 10
        assert torch.equal(alone.rows(IDS), expected)
        assert alone.age == float("inf")
        until(lambda: alone.trouble is not None, "the trouble")
        with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1"):
            alone.wait_for(11, timeout=0.1)


def test_a_cursor_that_a_shard_refuses_is_given_up_for_a_full_copy(
    shared: Cluster, job: str, trainer: Trainer, tmp_path: Path
) -> None:
    with RowFeed("rows", shared.address, job, directory=tmp_path, period=0.1) as feed:
        feed.wait_for(trainer.steps(10))
    for path in tmp_path.iterdir():
        copy = saved_copy(path, {}, 2**20)
        copy.cursor = b"nonsense"
        copy.save(path, {"job": job, "table": "rows"})
    clock = trainer.steps(10)
    with RowFeed("rows", shared.address, job, directory=tmp_path, period=0.1) as again:
        until(lambda: again.version >= clock, "the copy")
        assert trainer.is_had_by(again)


def test_a_damaged_file_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "rows-0-of-1.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(InvalidRequest, match=r"cannot be read .*: remove it, and the rows are copied anew"):
        RowFeed("rows", "127.0.0.1:1", directory=tmp_path)


@pytest.mark.parametrize("mode", cases(["sync"], ["async"]))
def test_a_feed_goes_on_after_a_shard_was_lost_and_restored(
    make_cluster: Callable[..., Cluster], tmp_path: Path, mode: str
) -> None:
    """Rows of steps that are lost go, too: the copy is what the servers have."""
    cluster = make_cluster(checkpoint_dir=tmp_path, checkpoint_every="5steps", timing=QUICK)
    with cluster.connect(mode) as session, RowFeed("rows", cluster.address, period=0.1) as feed:
        trainer = Trainer(session, max_rows=60)
        feed.wait_for(trainer.steps(12))

        def step_and_look() -> list[str]:
            trainer.steps(1)  # a checkpoint that begins too late is made at a later clock
            return CheckpointStore(tmp_path).names("default")

        until(step_and_look, "a checkpoint")
        cluster.start_again(1)
        assert len(feed) > 0, "rows stay readable meanwhile"
        trainer.steps(8)
        until(lambda: trainer.is_had_by(feed), "the rows of now")


@pytest.fixture
def guarded(tmp_path: Path, make_cluster: Callable[..., Cluster]) -> Cluster:
    roles = ("cluster", "reader", "reader:mine", "worker:mine", "reader:other", "worker:other")
    tokens = {role: f"{role}-token-of-some-length".replace(":", "-") for role in roles}
    (tmp_path / "tokens").write_text("".join(f"{role} {token}\n" for role, token in tokens.items()))
    for role, token in tokens.items():
        (tmp_path / role).write_text(token)
    for path in tmp_path.iterdir():
        path.chmod(0o600)
    return make_cluster(tokens=tmp_path / "tokens")


def test_a_reader_of_the_job_may_follow_it_and_others_may_not(guarded: Cluster, tmp_path: Path) -> None:
    with guarded.connect("sync", job="mine", token_file=str(tmp_path / "worker:mine")) as session:
        trainer = Trainer(session)
        clock = trainer.steps(3)
        for role in ("reader", "reader:mine"):
            with RowFeed("rows", guarded.address, "mine", token_file=str(tmp_path / role)) as feed:
                feed.wait_for(clock)
                assert trainer.is_had_by(feed)
        for role, said in (("reader:other", "for job other only"), ("worker:other", "takes the role")):
            with (
                RowFeed("rows", guarded.address, "mine", token_file=str(tmp_path / role)) as feed,
                pytest.raises(Forbidden, match=said),
            ):
                feed.wait_for(clock)
        address = guarded.servers[0].address
        for role, may in (("worker:mine", True), ("worker:other", False)):
            shown = ps_worker.config.access(token_file=str(tmp_path / role))  # type: ignore[attr-defined]
            watch = iter(RowWatch(0, address, shown, "mine", "rows", b"", 1.0))
            if may:
                assert next(watch).begin is not None
                watch.close()  # type: ignore[attr-defined]
            else:
                with pytest.raises(Forbidden, match="for job other only"):
                    next(watch)


def test_what_is_not_there_is_said(shared: Cluster, job: str, trainer: Trainer) -> None:
    with RowFeed("others", shared.address, job) as feed:
        with pytest.raises(TryLater, match="the rows of table 'others' are not here yet"):
            feed.rows(IDS)
        until(lambda: feed.trouble is not None, "the trouble")
        assert isinstance(feed.trouble, NotFound)
        with pytest.raises(Unreachable, match=r"has no table 'others'; its tables: 'rows'"):
            feed.wait_for(timeout=0.1)
    with pytest.raises(InvalidRequest, match=r"period must be 0.1 to 3600 seconds, got 0.01"):
        RowFeed("rows", shared.address, period=0.01)
    with pytest.raises(InvalidRequest, match=r"a feed needs a server"):
        RowFeed("rows")


def test_a_reader_that_never_reads_holds_nobody_up_and_is_cut_off(
    make_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(shards=1, limits=Limits(stall_seconds=0.5))
    begun, begin_feed = list[ShardFeed](), ShardFeed.begin
    monkeypatch.setattr(ShardFeed, "begin", lambda feed: (begun.append(feed), begin_feed(feed))[1])

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = ps_worker.Embedding(512, seed=1)

    with cluster.connect("sync") as session:
        own = Wide()
        _, optimizer = session.prepare(own, torch.optim.SGD(own.parameters(), lr=0.1))

        def step(first: int) -> None:
            own.rows(torch.arange(first, first + 8_000)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step(0)  # 16 MB: more than a connection takes before its reader reads
        addresses, _ = shard_addresses(cluster.address)
        watch = RowWatch(0, addresses[0], ps_worker.config.access(), "default", "rows", b"", 0.1)  # type: ignore[attr-defined]
        hosted = cluster.shards[0].jobs()["default"]
        until(lambda: begun, "the feed")
        for number in range(5):
            step(4_000 * number)
        until(lambda: not hosted.feeds(), "the end of a feed that is not read")
        watch.cancel()
        assert session.clock == 6


def begin(full: bool = True, version: int = 1) -> FeedRoundBegin:
    return FeedRoundBegin(full, version, 1, 2, Initializer("constant", 9.0))


def test_a_full_copy_leaves_what_was_there_readable_until_its_end() -> None:
    def part(
        *ids: int, begins: FeedRoundBegin | None = None, removed: tuple[int, ...] = (), cursor: bytes = b""
    ) -> ReadRowsMessage:
        numbers = torch.tensor(ids, dtype=torch.int64)
        gone = torch.tensor(removed, dtype=torch.int64).numpy()
        return ReadRowsMessage(
            begins, gone, numbers.numpy(), numbers[:, None].float().expand(-1, 2).contiguous(), cursor
        )

    copy = RowCopy(begin(), 2**20)
    copy.take(part(1, 2, 3, begins=begin(), cursor=b"a"))
    copy.take(part(4, 4, 2, begins=begin(False, 2), removed=(1, 1, 7), cursor=b"b"))
    every = torch.arange(1, 6).numpy()
    assert copy.read(every)[:, 0].tolist() == [9, 2, 3, 4, 9]
    copy.take(part(3, 5, begins=begin(version=1)))
    assert copy.read(every)[:, 0].tolist() == [9, 2, 3, 4, 5]
    assert (copy.version, copy.cursor) == (2, b"b")
    copy.take(part(cursor=b"c"))
    assert copy.read(every)[:, 0].tolist() == [9, 9, 3, 9, 5]
    assert (len(copy), copy.version, copy.cursor) == (2, 1, b"c")


def test_no_row_changes_in_a_block_of_reading_and_a_closed_feed_does_not_wait_for_its_end(
    shared: Cluster, job: str, trainer: Trainer
) -> None:
    feed = RowFeed("rows", shared.address, job, period=0.1)
    feed.wait_for(trainer.steps(3))
    with feed.reading() as version:
        before = feed.rows(IDS)
        clock = trainer.steps(3)
        until(lambda: feed._blocks.gives_way, "changes that wait")
        assert torch.equal(feed.rows(IDS), before)
        assert (version, feed.version) == (3, 3)
    assert feed.wait_for(clock) == clock
    assert trainer.is_had_by(feed)
    with feed.reading():
        trainer.steps(3)
        until(lambda: feed._blocks.gives_way, "changes that wait")
        feed.close()
        assert feed.version == clock
    assert feed.rows(torch.empty(0, 2, dtype=torch.int64)).shape == (0, 2, 3)


def test_rows_are_read_while_others_come(shared: Cluster, job: str, trainer: Trainer) -> None:
    """Each row is as of one update: its elements belong together."""
    done, torn = threading.Event(), []

    def read() -> None:
        while not done.is_set():
            rows = feed.rows(IDS)
            torn.extend(row for row in rows if not row.isfinite().all())

    with RowFeed("rows", shared.address, job, period=0.1) as feed:
        feed.wait_for(trainer.steps(1))
        thread = threading.Thread(target=read)
        thread.start()
        feed.wait_for(trainer.steps(30))
        done.set()
        thread.join()
    assert not torn
