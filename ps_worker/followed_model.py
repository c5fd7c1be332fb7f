"""`subscribe`: a job's weights in a process that does not train, as a model that follows training."""

from __future__ import annotations

import asyncio
import math
import threading
import time
import weakref
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch
from torch import nn

from ps_feed.subscribing import reading_from
from ps_feed.subscription import Subscription
from ps_protocol.errors import InvalidRequest, NotFound, PSError, Unreachable
from ps_runtime.settings import JOB_NAME, SHARED_DIRECTORY
from ps_worker import reading_blocks
from ps_worker.edition_tensors import Edition, MadeOf
from ps_worker.fitted_model import Fit, Names, Slot, fit
from ps_worker.followed_tables import Claim, FollowedTables, SharedRowFeed, bind
from ps_worker.made_editions import EditionMaker, TensorMaker, is_copied
from ps_worker.reading_blocks import enter_all, leave_all

M = TypeVar("M", bound=nn.Module)
LOOK_SECONDS = 0.01  # the pause between two looks for a newer edition in `async for`
ROW_PERIOD, SHORTEST_ROW_PERIOD = 1.0, 0.1  # seconds between two looks for changes of rows


# An edition with a model's tensors, and what each of them becomes.
Made = tuple[Edition, list[tuple[torch.Tensor, torch.Tensor]]]


class _Loaded:
    """A loaded model: its tensors, their version, the feeds of its rows, and the number of its readers.

    Attributes:
        is_copied: Whether a tensor of it is a copy, which takes time to make.
        ready: If so, the last edition of which a thread has made the tensors.
        problem: An edition of which it could not make them, and why.
    """

    def __init__(self, model: nn.Module, row_feeds: Mapping[str, SharedRowFeed], tensors: TensorMaker) -> None:
        self.model, self._tensors = weakref.ref(model), tensors
        self.slots, self.is_copied = list[Slot](), False
        self.row_blocks = [feed.blocks for feed in row_feeds.values()]
        self.edition: Edition | None = None
        self.ready: Made | None = None
        self.problem: tuple[Edition, Exception] | None = None
        self.readers = 0
        self.changed = threading.Condition()

    def views(self, edition: Edition) -> Made:
        """Returns the tensors of an edition where they are views of it. In another type or device they are copied."""
        slots = self.slots
        tensors = [slot.source.tensor(edition).to(slot.target.device, slot.target.dtype) for slot in slots]
        return edition, [(slot.target, tensor) for slot, tensor in zip(slots, tensors, strict=True)]

    def copies(self, edition: Edition) -> Made:
        """Returns the tensors of an edition in the model's types and devices. The caller holds the feed's `_making`."""
        slots = self.slots
        tensors = self._tensors.made(slots, edition)
        return edition, [(slot.target, tensor) for slot, tensor in zip(slots, tensors, strict=True)]

    def put(self, made: Made) -> None:
        """Makes the model use these tensors. The caller holds `changed`, and there is no reader."""
        self.edition, tensors = made
        for target, tensor in tensors:
            target.data = tensor

    @property
    def gives_way(self) -> bool:
        """Whether changes of rows wait for other readers, which `give_way` lets in."""
        return any(blocks.gives_way for blocks in self.row_blocks)

    def give_way(self, seconds: float) -> None:
        """Lets changes of rows in that wait for other readers."""
        deadline = time.monotonic() + seconds
        for blocks in self.row_blocks:
            blocks.give_way(max(0.0, deadline - time.monotonic()))

    def hold_rows(self) -> None:
        """Has no row change until `leave`, for a reader that is counted."""
        try:
            enter_all(self.row_blocks)
        except BaseException:
            self._count_out()
            raise

    def leave(self) -> None:
        """Counts a reader out, and lets rows change."""
        leave_all(self.row_blocks)
        self._count_out()

    def _count_out(self) -> None:
        try:
            self._tensors.used()
        finally:  # an error of a reader's own work on a GPU may show here
            with self.changed:
                self.readers -= 1
                self.changed.notify_all()


class WeightFeed:
    """A job's weights, which follow training. `ps_torch.subscribe` makes it; its methods are thread-safe.

    A feed takes no part in the job. It needs the role reader, and training does not wait for it. It follows servers
    that are started again or moved, and jobs that are rolled back.
    """

    def __init__(
        self,
        subscription: Subscription,
        job: str,
        names: Names | None,
        tables: FollowedTables | None = None,
        maker: EditionMaker | None = None,
    ) -> None:
        self._subscription, self._job, self._names, self._tables = subscription, job, names, tables
        self._maker = maker  # None: readers make the tensors of copied models themselves
        self._models: weakref.WeakKeyDictionary[nn.Module, _Loaded] = weakref.WeakKeyDictionary()
        self._loading, self._making = threading.Lock(), threading.Lock()
        self._tensors = TensorMaker()

    def __enter__(self) -> WeightFeed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def version(self) -> int:
        """The version of the newest edition; -1 before the first."""
        return self._subscription.version

    @property
    def behind(self) -> int:
        """The number of updates that the newest edition lacks, as far as the servers have told; -1 before the first."""
        return self._subscription.behind

    @property
    def age(self) -> float:
        """Seconds since the newest edition was last known to equal the servers' weights; inf: never.

        With tables the copy of their rows counts, too: the older one of the two.
        """
        return max(self._subscription.age, 0.0 if self._tables is None else self._tables.age)

    @property
    def restores(self) -> int:
        """How often the job was rolled back to a checkpoint since the feed began. Only then a version falls."""
        return self._subscription.restores

    @property
    def ended(self) -> bool:
        """Whether the job has ended: no edition comes after the newest."""
        return self._subscription.ended

    @property
    def trouble(self) -> PSError | None:
        """The error that keeps editions, or rows of loaded tables, from arriving; None if no error is known."""
        trouble = self._subscription.trouble
        if trouble is None and self._tables is not None and not self.ended:
            trouble = self._tables.trouble
        return trouble

    def wait_for(self, version: int = 0, timeout: float = 60.0) -> Edition:
        """Waits for an edition that contains at least `version` updates, and returns it.

        A model of copies may get it later (see `reading`): call `load(model)` afterwards, or read with `max_behind`.

        Args:
            version: The lowest version to wait for. From 1 on, weights that the job has left, for a checkpoint or
                another run, will not do, whatever their version. 0: the newest that there are.
            timeout: Seconds to wait.

        Raises:
            NotFound: The job has ended before.
            Unreachable: The time is over, or the feed is closed; the message has the reason.
            Forbidden, Unauthenticated, InvalidRequest, Unsupported: Waiting cannot help.
        """
        return Edition(self._subscription.wait(version, timeout), self._job)

    def __iter__(self) -> Iterator[Edition]:
        """Iterates over editions, from the newest on. One that arrives while the loop's body runs is replaced by a
        newer one. The iteration ends with the job, or when the feed is closed."""
        return (Edition(arrays, self._job) for arrays in self._subscription)

    async def __aenter__(self) -> WeightFeed:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    async def __aiter__(self) -> AsyncIterator[Edition]:
        """Iterates over editions, as `__iter__` does, in a coroutine. No thread waits meanwhile."""
        seen = None
        while True:
            is_last = self.ended or self._subscription.closed
            if self._subscription.edition is not seen:
                edition = self.wait_for(timeout=0)
                seen = edition.arrays
                yield edition
            elif is_last:
                return
            else:
                with suppress(NotFound, Unreachable):
                    self.wait_for(self.version + 1, timeout=0)  # raises an error that waiting cannot cure
                await asyncio.sleep(LOOK_SECONDS)

    def load(self, model: M, timeout: float = 60.0) -> M:
        """Waits for an edition, puts its weights into a model, and returns the model.

        The model may have any element types and be on any device: convert and move it before. Its parameters become
        views of the edition where type and device are the same, so do not train it. `reading` brings newer weights.

        The modules of its tables read a copy of the job's rows, which follows training: all rows are here when `load`
        returns. All models that one feed has loaded share this copy.

        Args:
            model: Any module whose parameters, persistent buffers and tables the job has, under the same names, or
                under those that `names` makes of them. It may lack tables. If the feed has `parameters`, the model has
                to have these, and may have others, which stay as they are.
            timeout: Seconds to wait.

        Raises:
            InvalidRequest: Names, shapes or tables differ. The message has the first three of each; nothing is loaded.
            Unsupported: The model has a table, and the feed's server is a relay; or the model is in training.
            Unreachable, NotFound and others: As `wait_for`.
        """
        deadline = time.monotonic() + timeout
        edition = self.wait_for(timeout=timeout)
        if model not in self._models:
            fitted, row_feeds, claim = self._fit(model, edition), dict[str, SharedRowFeed](), Claim()
            if fitted.tables:
                assert self._tables is not None
                row_feeds = self._tables.complete(fitted.tables, claim, deadline - time.monotonic())
                edition = self.wait_for()  # the newest, where the rows took long
                fitted = self._fit(model, edition)
            with self._loading:  # another thread may load the same model, and read it then
                if model not in self._models:
                    loaded = _Loaded(model, row_feeds, self._tensors)
                    self._fitted(loaded, fitted.slots, edition)
                    if loaded.is_copied:
                        with self._making:
                            loaded.ready = loaded.copies(edition)
                    loaded.put(loaded.ready or loaded.views(edition))
                    bind(fitted.tables, row_feeds)
                    self._models[model] = loaded
                    return model
        self._make(self._loaded(model))
        with self.reading(model, timeout=deadline - time.monotonic()):
            return model

    @contextmanager
    def reading(self, model: nn.Module, max_behind: int | None = None, timeout: float = 60.0) -> Iterator[int]:
        """Gives a block in which a loaded model does not change, and returns the version of its weights.

        The newest edition is put into the model before the block begins, unless another thread is in such a block: then
        both read the same version. If the model's tensors are copies, as on a GPU, it is the newest edition that a
        thread of the feed has copied; the block waits for a newer one only if `max_behind` asks for it.

        Rows of its tables do not change either, nor do those of other models with the same table: changes wait until no
        thread is in a block. A block that begins while some wait lets them in first, for a second at most.

        Args:
            model: A model that `load` has returned.
            max_behind: The largest number of updates that the weights may lack, as far as the servers have told. None:
                any number.
            timeout: Seconds to wait for weights that are new enough.

        Raises:
            InvalidRequest: The model was not loaded.
            NotFound: The job has ended, and its newest edition is not new enough.
            Unreachable: The time is over, or the feed is closed; the message has the reason.

        Example:
            with feed.reading(model, max_behind=4) as version:
                answer = model(question)
        """
        loaded, deadline = self._loaded(model), time.monotonic() + timeout
        loaded.give_way(min(reading_blocks.GIVE_WAY_SECONDS, timeout))
        edition = self._begin(loaded, max_behind, deadline)
        try:
            yield edition.version
        finally:
            loaded.leave()

    @asynccontextmanager
    async def reading_async(
        self, model: nn.Module, max_behind: int | None = None, timeout: float = 60.0
    ) -> AsyncIterator[int]:
        """Does what `reading` does in a coroutine. Others run while it waits.

        No thread waits meanwhile: `asyncio.to_thread` stays free for those who have the model. New weights are put into
        the model in a thread.

        Example:
            async with ps_torch.subscribe("trainer:50051") as feed:
                model = await asyncio.to_thread(feed.load, Model())
                async with feed.reading_async(model, max_behind=4) as version:
                    answer = await asyncio.to_thread(model, question)
        """
        loaded, began = self._loaded(model), time.monotonic()
        while True:
            waited = time.monotonic() - began
            is_last = self._subscription.closed or self.ended or waited >= timeout
            gives_way = loaded.gives_way and waited < reading_blocks.GIVE_WAY_SECONDS
            if is_last or (self._may_enter(loaded, max_behind) and not gives_way):
                entering = asyncio.ensure_future(asyncio.to_thread(self._begin, loaded, max_behind, 0.0))
                try:
                    edition = await asyncio.shield(entering)
                    break
                except asyncio.CancelledError:
                    # The thread goes on and enters the block. Without this, nobody would leave it.
                    entering.add_done_callback(lambda done: _leave(loaded, done))
                    raise
                except Unreachable:  # another has entered first
                    if is_last:
                        raise
            await asyncio.sleep(LOOK_SECONDS)
        try:
            yield edition.version
        finally:
            loaded.leave()

    def save(
        self,
        path: str | Path,
        max_shard_bytes: int | None = None,
        timeout: float = 60.0,
        names: Mapping[str, str | MadeOf] | None = None,
    ) -> int:
        """Writes the newest edition as safetensors, and returns its version; see Edition.save."""
        edition = self.wait_for(timeout=timeout)
        edition.save(path, max_shard_bytes, names)
        return edition.version

    def state_dict(
        self, timeout: float = 60.0, names: Mapping[str, str | MadeOf] | None = None
    ) -> dict[str, torch.Tensor]:
        """Returns the newest edition's tensors; see Edition.state_dict."""
        return self.wait_for(timeout=timeout).state_dict(names)

    def close(self) -> None:
        """Ends the feed. Editions and loaded models stay as they are."""
        self._subscription.close()
        if self._maker is not None:
            self._maker.close()
        if self._tables is not None:
            self._tables.close()

    def _loaded(self, model: nn.Module) -> _Loaded:
        loaded = self._models.get(model)
        if loaded is None:
            raise InvalidRequest("this model was not loaded: call load(model) before reading(model)")
        return loaded

    def _may_enter(self, loaded: _Loaded, max_behind: int | None) -> bool:
        """Whether `_enter` need not wait, as far as can be seen without one of its locks."""
        current, problem = loaded.edition if loaded.readers else None, loaded.problem
        if self._is_copied_in_thread(loaded):
            if problem is not None and problem[0].arrays is self._subscription.edition:
                return True  # it raises this
            ready = loaded.ready
            current = ready[0] if current is None and ready is not None else current
        return max_behind is None or self._lag(current) <= max_behind

    def _lag(self, current: Edition | None) -> float:
        """Returns how many updates the edition lacks; inf: the job has left its weights (a rollback, another run).

        current: None: the newest edition"""
        newest = self._subscription.edition
        if newest is None or self._subscription.is_left:
            return math.inf
        if current is None:
            return self.behind
        if (current.arrays.run, current.arrays.timeline) != (newest.run, newest.timeline):
            return math.inf
        return max(0, self._subscription.latest - current.version)

    def _begin(self, loaded: _Loaded, max_behind: int | None, deadline: float) -> Edition:
        """Begins a block of `reading`, which `loaded.leave` ends; see `_enter`."""
        edition = self._enter(loaded, max_behind, deadline)
        loaded.hold_rows()
        return edition

    def _enter(self, loaded: _Loaded, max_behind: int | None, deadline: float) -> Edition:
        """Returns the edition in the model once it is new enough, and counts a reader in."""
        while True:
            before = loaded.edition  # first: if another thread puts a newer one in than `newest`, this shows it
            newest = self.wait_for(timeout=max(0.0, deadline - time.monotonic()))
            made = self._made(loaded, newest)
            with loaded.changed:
                if made is not None and not loaded.readers:
                    if loaded.edition is not before:  # another thread has put one in: it may be older than this one
                        continue
                    loaded.put(made)
                current = loaded.edition
                assert current is not None
                lag = self._lag(current)
                if max_behind is None or lag <= max_behind:
                    loaded.readers += 1
                    return current
                if self.ended and not loaded.readers and current.arrays is newest.arrays:
                    raise NotFound(
                        f"job {self._job!r} has ended: version {current.version} is the newest there is, and {lag} "
                        "updates older than its last"
                    )
                left = 0.0 if self._subscription.closed else deadline - time.monotonic()
                if left <= 0:
                    why: object = f"{lag} updates behind, more than {max_behind}"
                    if lag == math.inf:
                        why = "the job has left these weights, for a checkpoint or another run"
                    why = self.trouble or why
                    raise Unreachable(f"job {self._job!r}: version {current.version} is too old: {why}")
                loaded.changed.wait(min(left, 0.05) if not loaded.readers else left)

    def _made(self, loaded: _Loaded, newest: Edition) -> Made | None:
        """Returns the edition that a model is to get, with its tensors; None if the model has it.

        It is the newest one. Of a copied model it is the last of which the thread has made the tensors. Raises what
        has kept the thread from that.
        """
        before = loaded.edition
        if not self._is_copied_in_thread(loaded):
            self._fit_again(loaded, newest)
            if before is not None and before.arrays is newest.arrays:
                return None
            if not loaded.is_copied:
                return loaded.views(newest)
            with self._making:
                if not self._is_copied_in_thread(loaded):  # the thread may have begun meanwhile
                    loaded.ready = None  # it may be older than what the model gets now
                    return loaded.copies(newest)
        problem, ready = loaded.problem, loaded.ready
        if problem is not None and problem[0].arrays is newest.arrays:
            assert self._maker is not None
            self._maker.wake()  # the maker tries again, for the next reader
            raise problem[1].with_traceback(None)
        if ready is None or ready[0] is before:
            return None
        if any((target.device, target.dtype) != (made.device, made.dtype) for target, made in ready[1]):
            with self._making:  # the script has converted or moved the model since
                ready = loaded.ready = loaded.copies(ready[0])
        return ready

    def _is_copied_in_thread(self, loaded: _Loaded) -> bool:
        """Whether a thread makes the tensors of a model."""
        return loaded.is_copied and self._maker is not None and self._maker.runs

    def _make_all(self) -> None:
        """Makes the tensors of the newest edition for all models that are copied."""
        with self._loading:  # no model is added meanwhile
            models = list(self._models.values())
        for loaded in models:
            if not self._subscription.closed:
                self._make(loaded)

    def _make(self, loaded: _Loaded) -> None:
        """Makes the tensors of the newest edition for a model, if a thread does so for it. Readers are told why it
        could not."""
        with self._making:
            newest, ready = self._subscription.edition, loaded.ready
            is_made = newest is None or (ready is not None and ready[0].arrays is newest)
            if newest is None or is_made or not self._is_copied_in_thread(loaded):
                return
            edition = Edition(newest, self._job)
            try:
                self._fit_again(loaded, edition)
                ready, loaded.problem = loaded.copies(edition), None
            except Exception as error:  # the functions of a `MadeOf` are a script's
                loaded.problem = edition, error.with_traceback(None)  # whose frames keep what was made
            with loaded.changed:
                loaded.ready = ready if loaded.is_copied else None  # another run's model may be one of views
                loaded.changed.notify_all()

    def _fit_again(self, loaded: _Loaded, edition: Edition) -> None:
        """Checks again whether the model fits if another run of the job has begun. Raises InvalidRequest."""
        before, model = loaded.edition, loaded.model()
        if before is not None and model is not None and before.arrays.contents is not edition.arrays.contents:
            self._fitted(loaded, self._fit(model, edition).slots, edition)

    def _fitted(self, loaded: _Loaded, slots: list[Slot], edition: Edition) -> None:
        """Notes what the tensors of a model are made of."""
        with loaded.changed:
            loaded.slots = slots
            loaded.is_copied = any(is_copied(slot, edition) for slot in slots)
            loaded.ready = loaded.ready if loaded.is_copied else None
        if loaded.is_copied and self._maker is not None:
            self._maker.begin(self._make_all)

    def _fit(self, model: nn.Module, edition: Edition) -> Fit:
        return fit(model, edition, self._job, self._names)


def _leave(loaded: _Loaded, entering: asyncio.Future[Edition]) -> None:
    """Leaves the `reading` block of a coroutine that was cancelled while it entered."""
    if not entering.cancelled() and entering.exception() is None:
        loaded.leave()


def subscribe(
    server: str | None = None,
    job: str | None = None,
    *,
    every: int = 1,
    period: float = 0.0,
    wire: str = "float32",
    changes: bool | None = None,
    parameters: Collection[str] | None = None,
    names: Names | None = None,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    tls_ca: str | None = None,
    token_file: str | None = None,
    insecure: bool | None = None,
) -> WeightFeed:
    """Follows the weights of a job in a process that does not train.

    The servers copy their weights when a feed asks for them: an edition. A feed receives the newest edition in the
    background, as fast as it can.

    Args:
        server: HOST:PORT of the coordinator or a relay (PS_SERVER). Several relays have commas between them: where one
            does not answer, the feed goes on from the next. Relays hand on no rows of tables.
        job: The job's name (PS_JOB); "default" by default.
        every: The smallest number of updates between two editions. In sync and local modes editions have versions that
            it divides, unless these were missed and the job makes no update for a while.
        period: The smallest number of seconds between two editions, and between two looks for changes of rows, which
            are at least 0.1 seconds apart. 0: editions as fast as possible, rows once a second.
        wire: The element type in which float32 weights are transferred and kept: "float32", "bfloat16" or "float16".
            Other types stay as they are.
        changes: Whether to ask for what changed since the last edition, where that is less than the whole. The weights
            have the same bits either way. None: where editions arrive at less than 200 MB a second.
        parameters: The names of the tensors to transfer, in the job, and of tables whose rows are to follow it. None:
            all. `load` then needs these alone, and leaves the rest of a model as it is.
        names: The job's name of a tensor by the model's name, as a mapping or a function. Names that a mapping lacks
            are the same in both. In place of a name it may have a `MadeOf`, for tensors that are fused, split or
            transposed. A table goes by the name of its `weight`.
        tls_cert, tls_key, tls_ca, token_file, insecure: As for `connect`.

    Raises:
        InvalidRequest: Settings are out of range or contradict each other.

    Example:
        feed = ps_torch.subscribe("trainer:50051")
        model = feed.load(Model())
        with feed.reading(model, max_behind=4) as version:
            answer = model(question)
    """
    address, access = reading_from(server, tls_cert, tls_key, tls_ca, token_file, insecure, relays=True)
    name = JOB_NAME.find(job)
    wanted = None if parameters is None else tuple(parameters)
    shared_directory = SHARED_DIRECTORY.find()
    maker = EditionMaker()
    subscription = Subscription(
        address,
        name,
        every=every,
        wire=wire,
        parameters=wanted,
        period=period,
        access=access,
        changes=changes,
        shared_directory=shared_directory,
        on_event=maker.wake,
    )
    tables = FollowedTables(
        address,
        access,
        lambda: subscription.ended,
        job=name,
        period=max(SHORTEST_ROW_PERIOD, period or ROW_PERIOD),
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_ca=tls_ca,
        token_file=token_file,
        insecure=insecure,
    )
    return WeightFeed(subscription, name, names, tables, maker)
