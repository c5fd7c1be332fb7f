"""What the real code takes from `threading` and `concurrent.futures`, in virtual time.

A lock that is free costs nothing: only what has to wait hands control to another simulated thread. But now and then a
thread is held up before it takes one, as the operating system may do at any time. Which thread gets a lock that several
wait for is drawn by the seed, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from tests.simulation.world import Killed, Task, World

PREEMPTED_SECONDS = 0.03  # on average, where a thread is held up


class RLock:
    """threading.RLock."""

    __slots__ = ("_depth", "_owner", "_waiting", "_world")
    reentrant = True

    def __init__(self, world: World) -> None:
        self._world = world
        self._owner: Task | None = None
        self._depth = 0
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Takes the lock; waits for it if need be."""
        world, task = self._world, self._world.current
        if world.preemption and task is not None and world.random.random() < world.preemption:
            world.let_pass(world.random.expovariate(1 / PREEMPTED_SECONDS))
        if not self._depth:
            self._owner, self._depth = task, 1
            return True
        if self.reentrant and self._owner is task:
            self._depth += 1
            return True
        if not blocking:
            return False
        assert task is not None, f"the loop cannot wait for a lock of {self._owner and self._owner.name}"
        if not task.host.alive:
            raise Killed
        self._waiting.append(task)
        until = None if timeout < 0 else self._world.now + timeout
        while self._owner is not task:
            left = None if until is None else until - self._world.now
            if left is not None and left <= 0:
                self._waiting.remove(task)
                return False
            self._world.block(left)
        return True

    def release(self) -> None:
        """Gives the lock back."""
        if self._depth == 0:
            task = self._world.current
            if task is not None and not task.host.alive:
                return  # the thread is being ended, from within a wait
            raise RuntimeError("release of a lock that is free")
        self._depth -= 1
        if self._depth == 0:
            self._pass_on()

    def _pass_on(self) -> None:
        self._owner = None
        waiting = self._waiting
        if waiting:
            index = self._world.random.randrange(len(waiting)) if len(waiting) > 1 else 0
            self._owner, self._depth = waiting.pop(index), 1
            self._world.wake(self._owner)

    def locked(self) -> bool:
        """Whether a thread has it."""
        return self._depth > 0

    def release_all(self) -> int:
        """Gives the lock back, however often it was taken. Returns how often."""
        depth, self._depth = self._depth, 0
        self._pass_on()
        return depth

    def acquire_again(self, depth: int) -> None:
        """Takes the lock as often as it was taken."""
        self.acquire()
        self._depth = depth

    def __enter__(self) -> bool:
        if self._depth or self._world.preemption:
            return self.acquire()
        self._owner, self._depth = self._world.current, 1
        return True

    def __exit__(self, *_: object) -> None:
        if self._depth == 1 and not self._waiting:
            self._owner, self._depth = None, 0
        else:
            self.release()


class Lock(RLock):
    """threading.Lock."""

    __slots__ = ()
    reentrant = False


class Condition:
    """threading.Condition."""

    def __init__(self, world: World, lock: RLock | None = None) -> None:
        self._world = world
        self._lock = lock or RLock(world)
        self._waiting: list[tuple[Task, int]] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Takes the lock."""
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        """Gives the lock back."""
        self._lock.release()

    def __enter__(self) -> bool:
        return self._lock.__enter__()

    def __exit__(self, *_: object) -> None:
        self._lock.__exit__()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for a notice."""
        task = self._world.current
        assert task is not None
        entry = task, task.ticket
        self._waiting.append(entry)
        depth = self._lock.release_all()
        self._world.block(timeout)
        woken = entry not in self._waiting
        if not woken:
            self._waiting.remove(entry)
        self._lock.acquire_again(depth)
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """Waits until something holds."""
        until = None if timeout is None else self._world.now + timeout
        result = predicate()
        while not result:
            left = None if until is None else until - self._world.now
            if left is not None and left <= 0:
                break
            self.wait(left)
            result = predicate()
        return result

    def notify(self, n: int = 1) -> None:
        """Wakes some that wait."""
        chosen, self._waiting = self._waiting[:n], self._waiting[n:]
        for task, _ in chosen:
            self._world.wake(task)

    def notify_all(self) -> None:
        """Wakes all that wait."""
        self.notify(len(self._waiting))


class Event:
    """threading.Event."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._set

    def set(self) -> None:
        """Sets it."""
        self._set = True
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._world.wake(task)

    def clear(self) -> None:
        """Takes it back."""
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it is set."""
        if not self._set:
            task = self._world.current
            assert task is not None
            self._waiting.append(task)
            self._world.block(timeout)
            if task in self._waiting:
                self._waiting.remove(task)
        return self._set


class Thread:
    """threading.Thread. An exception that its target raises ends it, and no other thread, as in reality."""

    def __init__(
        self,
        world: World,
        target: Callable[..., object],
        name: str = "thread",
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        daemon: bool | None = None,
    ) -> None:
        self.name, self.daemon = name, daemon
        self._world = world
        self._work = lambda: target(*args, **(kwargs or {}))
        self._task: Task | None = None

    def start(self) -> None:
        """Starts it, in the process of the thread that calls."""
        assert self._world.current is not None
        self._task = self._world.current.host.spawn(self.name, self._work)

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._task is not None and not self._task.over

    def join(self, timeout: float | None = None) -> None:
        """Waits until it has ended."""
        if self._task is not None:
            self._task.join(timeout)


class Future:
    """concurrent.futures.Future."""

    def __init__(self, world: World) -> None:
        self._changed = Condition(world)
        self._done = False
        self._value: Any = None
        self._error: Exception | None = None
        self._callbacks: list[Callable[[Future], object]] = []

    def done(self) -> bool:
        """Whether the call has ended."""
        return self._done

    def settle(self, value: Any, error: Exception | None) -> None:
        """Notes how the call ended."""
        self._value, self._error, self._done = value, error, True
        self._changed.notify_all()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    def _await(self, timeout: float | None) -> None:
        with self._changed:
            if not self._changed.wait_for(self.done, timeout):
                raise TimeoutError

    def result(self, timeout: float | None = None) -> Any:
        """Returns what the call returned, or raises what it raised."""
        self._await(timeout)
        if self._error is not None:
            raise self._error
        return self._value

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Returns what the call raised."""
        self._await(timeout)
        return self._error

    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return False

    def add_done_callback(self, callback: Callable[[Future], object]) -> None:
        """Calls back when the call has ended; at once if it has."""
        if self._done:
            callback(self)
        else:
            self._callbacks.append(callback)

    def cancel(self) -> bool:
        """Does nothing: a call that was submitted is made."""
        return False


class ThreadPoolExecutor:
    """concurrent.futures.ThreadPoolExecutor."""

    def __init__(self, world: World, max_workers: int = 4, thread_name_prefix: str = "pool") -> None:
        self._world, self._most, self._name = world, max_workers, thread_name_prefix
        self._queue: deque[tuple[Future, Callable[[], Any]]] = deque()
        self._threads: list[Task] = []
        self._idle: list[Task] = []
        self._over = False

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future:
        """Has a thread of the pool make a call."""
        if self._over:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = Future(self._world)
        self._queue.append((future, lambda: call(*arguments, **named)))
        if self._idle:
            self._world.wake(self._idle.pop())
        elif len(self._threads) < self._most:
            assert self._world.current is not None
            host = self._world.current.host
            host.check_alive()
            self._threads.append(host.spawn(f"{self._name}_{len(self._threads)}", self._run))
        return future

    def _run(self) -> None:
        task = self._world.current
        assert task is not None
        while True:
            while self._queue:
                future, call = self._queue.popleft()
                try:
                    value = call()
                except Exception as error:
                    future.settle(None, error)
                else:
                    future.settle(value, None)
            if self._over:
                return
            self._idle.append(task)
            self._world.block()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Takes no more calls."""
        self._over = True
        if cancel_futures:
            self._queue.clear()
        idle, self._idle = self._idle, []
        for task in idle:
            self._world.wake(task)
        if wait:
            for task in self._threads:
                task.join()

    def __enter__(self) -> ThreadPoolExecutor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.shutdown(wait=error is None or not isinstance(error, Killed))
