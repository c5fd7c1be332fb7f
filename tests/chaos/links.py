"""Links to servers: TCP connections that can be cut, or held as if a cable were pulled.

Each link has a port of this machine, so that a worker, or its way to one server, can be cut alone. What is held is not
lost: it arrives when the link heals, late, unless the connection is cut then too.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

CHUNK = 2**16
START_SECONDS = 10.0


class Link:
    """A way to one server. Methods may be called from any thread, and have happened when they return."""

    def __init__(self, target: str, loop: asyncio.AbstractEventLoop) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._loop = loop
        self._open = asyncio.Event()
        self._open.set()
        self._is_cut = False
        self._ends: set[asyncio.StreamWriter] = set()
        listening = asyncio.start_server(self._accept, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(listening, loop).result(START_SECONDS)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def hold(self) -> None:
        """Lets nothing pass from now on, and tells no end of it."""
        self._on_loop(self._open.clear)

    def cut(self) -> None:
        """Resets every connection, and each that is made before the link heals."""
        self._is_cut = True
        self._on_loop(self._reset)

    def heal(self) -> None:
        """Lets what was held pass, and all that follows."""
        self._is_cut = False
        self._on_loop(self._open.set)

    def close(self) -> None:
        """Ends it, and every connection."""
        self._on_loop(self._server.close)
        self._on_loop(self._reset)

    def _on_loop(self, action: Callable[[], object]) -> None:
        async def act() -> None:
            action()

        asyncio.run_coroutine_threadsafe(act(), self._loop).result(START_SECONDS)

    def _reset(self) -> None:
        for end in self._ends:
            end.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._ends.add(writer)
        await self._open.wait()
        try:
            if self._is_cut:
                raise ConnectionError
            there, back = await asyncio.open_connection(self._host, int(self._port))
        except OSError:  # nothing listens there: the caller shall learn it as if there were no link between
            writer.transport.abort()
        else:
            self._ends.add(back)
            await asyncio.gather(self._copy(reader, back), self._copy(there, writer))
            self._ends.discard(back)
        self._ends.discard(writer)

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(CHUNK):
                await self._open.wait()
                target.write(data)
                await target.drain()
        target.transport.abort() if source.exception() else target.close()


class Links:
    """Links in a thread of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="links", daemon=True)
        self._thread.start()
        self._made: list[Link] = []

    def to(self, target: str) -> Link:
        """Makes a link to a server."""
        self._made.append(Link(target, self._loop))
        return self._made[-1]

    def close(self) -> None:
        """Ends all links, and the thread."""
        for link in self._made:
            link.close()

        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(START_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_SECONDS)
        self._loop.close()
