"""A model with tables follows a job as one without does: rows come with its weights, and stay while it is read."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import ps_torch as ps
from ps_protocol.errors import InvalidRequest, NotFound, Unreachable, Unsupported
from ps_worker import reading_blocks
from ps_worker.edition_tensors import Edition
from ps_worker.tables.followed_rows import FollowedRows
from ps_worker.tables.own_rows import LocalRows
from tests.tools.cluster import Cluster, until
from tests.tools.followed_trainer import relay
from tests.tools.remembering_trainer import in_background

IDS = torch.cat([torch.arange(-20, 200), torch.tensor([2**62, -(2**63)])])
PERIOD = 0.1


class Model(nn.Module):
    """Both kinds of tables, and a layer."""

    def __init__(self, dim: int = 3, bag: int = 4) -> None:
        super().__init__()
        self.item = ps.Embedding(dim, initial="uniform", scale=0.1, seed=7, padding_idx=3)
        self.tags = ps.EmbeddingBag(bag, mode="mean", seed=8)
        self.top = nn.Linear(dim + bag, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.item(ids), self.tags(ids.unsqueeze(1) // 2)], 1))  # type: ignore[no-any-return]


class Trainer:
    """A worker that trains a model, some ids a step."""

    def __init__(self, session: ps.Session, own: nn.Module | None = None) -> None:
        self.session, self.own = session, own or Model()
        self._model, self._optimizer = session.prepare(self.own, torch.optim.Adagrad(self.own.parameters(), lr=0.1))

    def steps(self, count: int) -> int:
        """Trains; the worker's clock then."""
        for _ in range(count):
            self._optimizer.zero_grad()
            self._model(torch.randint(0, 40, (20,)) + 3 * self.session.clock).square().sum().backward()
            self._optimizer.step()
        return self.session.clock

    @torch.no_grad()
    def answer(self) -> torch.Tensor:
        return self.own(IDS)  # type: ignore[no-any-return]


@pytest.fixture
def trainer(shared: Cluster, job: str) -> Iterator[Trainer]:
    with shared.connect("sync", job=job) as session:
        yield Trainer(session)


@pytest.fixture
def feed(shared: Cluster, job: str) -> Iterator[ps.WeightFeed]:
    with ps.subscribe(shared.address, job, period=PERIOD) as made:
        yield made


@torch.no_grad()
def answer(feed: ps.WeightFeed, model: nn.Module) -> torch.Tensor:
    with feed.reading(model):
        return model(IDS)  # type: ignore[no-any-return]


def agree(feed: ps.WeightFeed, model: nn.Module, trainer: Trainer) -> None:
    """Waits until a loaded model answers as the trainer's does."""
    expected = trainer.answer()
    until(lambda: torch.equal(answer(feed, model), expected), "the trainer's answers")


def row_feed(module: nn.Module) -> Any:
    """What a module of a loaded model reads."""
    assert isinstance(module, ps.Embedding)
    assert isinstance(module.local, FollowedRows)
    return module.local.feed


def waits(module: nn.Module) -> bool:
    """Whether a change of its rows waits for readers."""
    return row_feed(module).blocks.gives_way  # type: ignore[no-any-return]


def row_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("row-feed")}


def test_a_loaded_model_answers_as_the_trainers_does_and_follows_it(feed: ps.WeightFeed, trainer: Trainer) -> None:
    trainer.steps(8)
    model = feed.load(Model())
    agree(feed, model, trainer)
    assert len(model.item) == len(trainer.own.item)  # type: ignore[arg-type]
    trainer.steps(8)
    agree(feed, model, trainer)
    assert feed.trouble is None
    assert feed.age < 60
    feed.close()
    assert torch.equal(answer(feed, model), trainer.answer()), "it stays as it is"


def test_in_async_rows_are_those_of_training_once_it_rests(shared: Cluster, job: str, feed: ps.WeightFeed) -> None:
    with shared.connect("async", job=job) as session:
        trainer = Trainer(session)
        trainer.steps(5)
        model = feed.load(Model())
        trainer.steps(5)
        expected = trainer.own.item.rows(IDS)  # type: ignore[operator, union-attr]
        until(lambda: torch.equal(model.item.rows(IDS), expected), "the rows")


def test_no_row_changes_while_a_model_is_read_although_training_goes_on(feed: ps.WeightFeed, trainer: Trainer) -> None:
    trainer.steps(5)
    model = feed.load(Model())
    agree(feed, model, trainer)
    with feed.reading(model):
        before, count = model(IDS), len(model.item)
        trainer.steps(5)
        until(lambda: waits(model.item) and waits(model.tags), "changes that wait")
        assert torch.equal(model(IDS), before)
        assert len(model.item) == count
    agree(feed, model, trainer)


def test_a_coroutine_reads_rows_that_do_not_change(feed: ps.WeightFeed, trainer: Trainer) -> None:
    trainer.steps(5)

    async def read() -> nn.Module:
        async with feed:
            model = await asyncio.to_thread(feed.load, Model())
            async with feed.reading_async(model):
                before = model(IDS)
                trainer.steps(5)
                await asyncio.to_thread(until, lambda: waits(model.item), "changes that wait")
                assert torch.equal(model(IDS), before)
            expected = trainer.answer()
            while True:
                async with feed.reading_async(model):
                    if torch.equal(model(IDS), expected):
                        return model

    asyncio.run(asyncio.wait_for(read(), 60))


def test_a_reader_that_comes_lets_changes_in_that_wait_for_others(
    shared: Cluster, feed: ps.WeightFeed, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where there is always a reader, of this model or of another one with the same tables."""
    monkeypatch.setattr(reading_blocks, "GIVE_WAY_SECONDS", 60.0)
    trainer.steps(5)
    model, other = feed.load(Model()), feed.load(Model())
    agree(feed, model, trainer)
    blocks, seen = row_feed(model.item).blocks, list[torch.Tensor]()

    def read() -> None:
        with feed.reading(other):
            seen.append(other.item(IDS))

    with feed.reading(model):
        trainer.steps(1)
        until(lambda: blocks._waiting == len(shared.shards), "a change of each shard that waits")
        reader = in_background(read)
    reader.join()
    assert torch.equal(seen[0], trainer.own.item(IDS))  # type: ignore[operator]


def test_readers_that_wait_for_one_another_read_what_there_is(
    feed: ps.WeightFeed, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_blocks, "GIVE_WAY_SECONDS", 0.05)
    trainer.steps(5)
    model, other = feed.load(Model()), feed.load(Model())
    with feed.reading(model):
        before = model.item(IDS)
        trainer.steps(1)
        until(lambda: waits(model.item), "changes that wait")
        with feed.reading(other):
            assert torch.equal(other.item(IDS), before)


def test_what_does_not_fit_is_told_by_name_and_nothing_is_loaded(
    shared: Cluster, job: str, feed: ps.WeightFeed, trainer: Trainer
) -> None:
    trainer.steps(2)
    threads = row_threads()

    class More(Model):
        def __init__(self, **sizes: int) -> None:
            super().__init__(**sizes)
            self.more = nn.ModuleList(ps.Embedding(2) for _ in range(5))
            self.head = nn.Linear(2, 2)

    other = More(bag=5)
    other.item = ps.Embedding(3)
    before = copy.deepcopy(other.state_dict())
    said = (
        r"the job has no head.weight, head.bias; the shapes differ of top.weight \[2, 8\] for \[2, 7\]; "
        r"the job has no table more.0, more.1, more.2 and 2 more; "
        r"the tables differ of item with initial normal 1.0 for uniform 0.1, tags of 5 elements for 4"
    )
    with pytest.raises(InvalidRequest, match=said):
        feed.load(other)
    assert all(torch.equal(each, before[name]) for name, each in other.state_dict().items())
    assert all(isinstance(each.local, LocalRows) for each in other.modules() if isinstance(each, ps.Embedding))
    assert row_threads() == threads
    with torch.device("meta"):
        nowhere = Model()
    with pytest.raises(InvalidRequest, match=r"on the meta device"):
        feed.load(nowhere)
    with pytest.raises(Unsupported, match=r"table 'item' is in training in this process"):
        feed.load(trainer.own)


def test_a_job_of_tables_alone_is_followed(shared: Cluster, job: str, feed: ps.WeightFeed) -> None:
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.item = ps.Embedding(3, seed=7)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.item(ids)  # type: ignore[no-any-return]

    with shared.connect("sync", job=job) as session:
        trainer = Trainer(session, Tables())
        trainer.steps(3)
        model = feed.load(Tables())
        agree(feed, model, trainer)
        trainer.steps(3)
        agree(feed, model, trainer)
        assert (feed.version, feed.behind) == (0, 0), "these count updates of weights outside of tables"
    until(lambda: feed.ended, "the end of the job")
    assert feed.trouble is None


def test_a_model_that_is_a_table_and_one_under_other_names(shared: Cluster, job: str, feed: ps.WeightFeed) -> None:
    with shared.connect("sync", job=job) as session:
        trainer = Trainer(session, ps.Embedding(3, seed=7))
        trainer.steps(3)
        agree(feed, feed.load(ps.Embedding(3)), trainer)
        names = {"inner.weight": "weight"}
        with ps.subscribe(shared.address, job, period=PERIOD, names=names) as mapped:
            model = mapped.load(nn.ModuleDict({"inner": ps.Embedding(3)}))
            with mapped.reading(model):
                assert torch.equal(model["inner"].rows(IDS), trainer.answer())
        fused = {"inner.weight": ps.MadeOf(["weight", "more.weight"])}
        with (
            ps.subscribe(shared.address, job, names=fused) as mapped,
            pytest.raises(InvalidRequest, match=r"table 'inner' is one table of the job"),
        ):
            mapped.load(nn.ModuleDict({"inner": ps.Embedding(3)}))


def test_of_a_part_only_the_tables_that_it_names_follow_the_job(shared: Cluster, job: str, trainer: Trainer) -> None:
    trainer.steps(3)
    for wanted in (["top.weight", "tags"], ["tags.weight"]):
        with ps.subscribe(shared.address, job, period=PERIOD, parameters=wanted) as feed:
            model = feed.load(Model())
            expected = trainer.own.tags.rows(IDS)  # type: ignore[operator, union-attr]
            until(lambda: torch.equal(model.tags.rows(IDS), expected), "the rows")  # noqa: B023
            assert isinstance(model.item.local, LocalRows), "it stays as it is"
            with pytest.raises(InvalidRequest, match=r"the model has no table tags"):
                feed.load(nn.ModuleDict({"top": nn.Linear(7, 2), "item": ps.Embedding(3)}))
    with (
        ps.subscribe(shared.address, job, parameters=["top.weight", "others"]) as feed,
        pytest.raises(InvalidRequest, match=r"has no parameter others; it has 4, such as top.weight, top.bias, item"),
    ):
        feed.load(Model())


def test_a_model_may_lack_tables_of_the_job(shared: Cluster, job: str, feed: ps.WeightFeed, trainer: Trainer) -> None:
    trainer.steps(3)
    threads = row_threads()
    feed.wait_for(3)
    model = feed.load(nn.ModuleDict({"top": nn.Linear(7, 2)}))
    assert torch.equal(model["top"].weight, feed.state_dict()["top.weight"])
    assert row_threads() == threads


def test_a_relay_has_no_rows_and_the_error_says_where_they_are(shared: Cluster, job: str, trainer: Trainer) -> None:
    trainer.steps(3)
    with relay(shared.address) as running, ps.subscribe(running.address, job) as feed:
        model = Model()
        before, threads = copy.deepcopy(model.top.weight), row_threads()
        said = rf"is a relay, .* has the table item, tags: subscribe at the job's coordinator \({shared.address}\)"
        with pytest.raises(Unsupported, match=said):
            feed.load(model)
        assert torch.equal(model.top.weight, before)
        assert row_threads() == threads
        feed.load(nn.ModuleDict({"top": nn.Linear(7, 2)}))
    with ps.subscribe(f"{running.address},{shared.address}", job, period=PERIOD) as feed:
        agree(feed, feed.load(Model()), trainer)


def test_rows_of_a_loaded_model_change_only_by_training_of_the_job(feed: ps.WeightFeed, trainer: Trainer) -> None:
    trainer.steps(3)
    model = feed.load(Model())
    with pytest.raises(Unsupported, match=r"table 'item' are those of a job .*: a worker of the job may assign rows"):
        model.item.assign(torch.tensor([1]), torch.zeros(1, 3))
    with pytest.raises(Unsupported, match=r"load_state_dict cannot replace them"):
        model.load_state_dict(Model().state_dict())
    model.item.announce(IDS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(IDS).sum().backward()
    with pytest.raises(Unsupported, match=r"no optimizer of this process steps them"):
        optimizer.step()


def test_copies_of_a_loaded_model_have_its_rows_and_follow_nothing(feed: ps.WeightFeed, trainer: Trainer) -> None:
    trainer.steps(3)
    model = feed.load(Model())
    agree(feed, model, trainer)
    with feed.reading(model), torch.no_grad():
        expected = model(IDS)
        known = torch.tensor([id for id in IDS.tolist() if id in range(3, 40)])
        frozen, plain = ps.freeze(model), copy.deepcopy(model)
        pickled, again = pickle.loads(pickle.dumps(model)), Model()
        again.load_state_dict(model.state_dict())
        for each in (plain, pickled, again):
            assert torch.equal(each(IDS), expected)
            assert isinstance(each.item.local, LocalRows)
        trained = known[[id in frozen.item.places.ids for id in known]]
        assert len(trained) > 10
        assert torch.equal(frozen.item(trained), model.item(trained))
        assert len(frozen.tags.places.ids) == len(model.tags) + 1


def test_models_share_one_feed_of_each_table_which_ends_with_the_last_of_them(
    feed: ps.WeightFeed, trainer: Trainer
) -> None:
    trainer.steps(3)
    before = row_threads()
    model, other = feed.load(Model()), feed.load(Model())
    assert row_feed(model.item) is row_feed(other.item)
    threads = row_threads()
    del model
    gc.collect()
    trainer.steps(3)
    agree(feed, other, trainer)
    assert row_threads() == threads
    del other
    gc.collect()
    until(lambda: row_threads() == before, "the end of the row feeds")
    assert feed.age < 60
    agree(feed, feed.load(Model()), trainer)


def test_a_model_that_another_feed_loads_gives_back_the_rows_of_the_first(
    shared: Cluster, job: str, feed: ps.WeightFeed, trainer: Trainer
) -> None:
    trainer.steps(3)
    model = feed.load(Model())
    threads = row_threads()
    with ps.subscribe(shared.address, job, period=PERIOD) as other:
        other.load(model)
        until(lambda: not threads & row_threads(), "the end of the first feed's rows")
        trainer.steps(3)
        agree(other, model, trainer)


def test_a_closed_feed_has_no_threads_even_while_a_model_is_read(shared: Cluster, job: str, trainer: Trainer) -> None:
    trainer.steps(3)
    before = {*threading.enumerate()}
    feed = ps.subscribe(shared.address, job, period=PERIOD)
    model = feed.load(Model())
    with feed.reading(model):
        trainer.steps(3)
        until(lambda: waits(model.item), "changes that wait")
        feed.close()
        left = {each for each in {*threading.enumerate()} - before if each.name.startswith(("row-feed", "ps-feed"))}
        assert not left
    another = feed.load(Model())
    assert torch.equal(another.item.rows(IDS), model.item.rows(IDS)), "the rows that are here"
    fresh = ps.subscribe(shared.address, job)
    fresh.wait_for()
    fresh.close()
    with pytest.raises(Unreachable, match=r"the feed is closed, and has no rows of table item, tags"):
        fresh.load(Model())


def test_rows_that_do_not_come_in_time_leave_a_model_as_it_was(
    feed: ps.WeightFeed, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.steps(3)
    feed.wait_for()
    before = row_threads()
    monkeypatch.setattr("ps_worker.row_feed.shard_addresses", lambda *_: ({}, 2))
    model = Model()
    weight = copy.deepcopy(model.top.weight)
    with pytest.raises(Unreachable, match=r"table 'item' did not come to version 0"):
        feed.load(model, timeout=0.2)
    assert torch.equal(model.top.weight, weight)
    assert isinstance(model.item.local, LocalRows)
    until(lambda: row_threads() == before, "the end of the row feeds")


def test_trouble_and_age_tell_of_rows_too(
    feed: ps.WeightFeed, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.steps(3)
    model = feed.load(Model())
    refused = row_feed(model.item)._serving[0]
    refused.trouble = Unreachable("no rows come")
    assert str(feed.trouble) == "no rows come"
    refused.heard -= 1000.0
    assert feed.age > 900


def test_a_loaded_model_has_the_last_rows_of_its_job(shared: Cluster, job: str) -> None:
    """Also where the next period would begin long after the end of the job."""
    with ps.subscribe(shared.address, job, period=3600.0) as feed:
        with shared.connect("sync", job=job) as session:
            trainer = Trainer(session)
            trainer.steps(3)
            model = feed.load(Model())
            feeds = [row_feed(model.item), row_feed(model.tags)]
            trainer.steps(9)
            expected = trainer.answer()
        until(lambda: feed.ended and not any(each._thread.is_alive() for each in feeds), "the end of all feeds")
        assert torch.equal(answer(feed, model), expected)
        assert feed.trouble is None


def test_rows_of_another_run_do_not_come_to_a_model_of_one_that_has_ended(
    shared: Cluster, job: str, feed: ps.WeightFeed
) -> None:
    with shared.connect("sync", job=job) as session:
        trainer = Trainer(session)
        trainer.steps(3)
        model = feed.load(Model())
        agree(feed, model, trainer)
        expected = trainer.answer()
        thread = row_feed(model.item)._thread
    until(lambda: feed.ended and not thread.is_alive(), "the end of both feeds")
    with shared.connect("sync", job=job) as session:
        Trainer(session).steps(9)
        assert torch.equal(answer(feed, model), expected)
        assert feed.trouble is None
        assert torch.equal(answer(feed, feed.load(Model())), expected), "the rows that are here do for others"
        del model
        gc.collect()
        with pytest.raises(
            NotFound, match=r"the job has ended, and its rows with it: none are here of table item, tag"
        ):
            feed.load(Model())


def test_a_run_whose_tables_differ_is_told_where_a_model_is_read(
    shared: Cluster, job: str, feed: ps.WeightFeed
) -> None:
    with shared.connect("sync", job=job) as session:
        Trainer(session).steps(3)
        model = feed.load(Model())
        edition = feed.wait_for()
    loaded, contents = feed._models[model], copy.copy(edition.arrays.contents)
    contents.tables = {**contents.tables, "item": replace(contents.tables["item"], dim=5)}
    with pytest.raises(InvalidRequest, match=r"the tables differ of item of 3 elements for 5"):
        feed._fit_again(loaded, Edition(replace(edition.arrays, contents=contents), job))
