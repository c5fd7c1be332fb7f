"""The links between workers and servers: TCP connections that can be cut, or held as if a cable were pulled.

One port of this machine for each worker and server, so that a worker, or its way to one server, can be cut alone. What
is held is not lost: it arrives when the link heals, late, unless the connection is cut then too.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence

CHUNK = 2**16
START_SECONDS = 10.0


class Link:
    """One worker's way to one server. Methods may be called from any thread."""

    def __init__(self, target: str, loop: asyncio.AbstractEventLoop) -> None:
        self.address = ""
        self._host, _, self._port = target.rpartition(":")
        self._loop = loop
        self._open = asyncio.Event()
        self._open.set()
        self._ends: set[asyncio.StreamWriter] = set()

    def hold(self) -> None:
        """Nothing passes from now on, and nobody is told."""
        self._loop.call_soon_threadsafe(self._open.clear)

    def heal(self) -> None:
        """What was held passes, and all that follows."""
        self._loop.call_soon_threadsafe(self._open.set)

    def cut(self) -> None:
        """Resets every connection; new ones may be made."""
        self._loop.call_soon_threadsafe(lambda: [end.transport.abort() for end in list(self._ends)])

    async def serve(self) -> None:
        """Listens on a free port."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._open.wait()
        try:
            there, back = await asyncio.open_connection(self._host, int(self._port))
        except OSError:  # nobody listens there: the caller shall learn it as if there were no link between
            writer.transport.abort()
            return
        self._ends |= {writer, back}
        await asyncio.gather(self._copy(reader, back), self._copy(there, writer))
        self._ends -= {writer, back}

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(CHUNK):
                await self._open.wait()
                target.write(data)
                await target.drain()
        target.transport.abort() if source.exception() else target.close()


class Links:
    """A link for each worker to each server, in a thread of their own. `routes` is what workers call instead."""

    def __init__(self, workers: int, servers: Sequence[str]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="links", daemon=True)
        self._thread.start()
        self.of = {rank: {server: Link(server, self._loop) for server in servers} for rank in range(workers)}
        for links in self.of.values():
            for link in links.values():
                asyncio.run_coroutine_threadsafe(link.serve(), self._loop).result(START_SECONDS)

    @property
    def routes(self) -> dict[str, dict[str, str]]:
        """By rank, the link to take for each server's address."""
        return {str(rank): {to: link.address for to, link in links.items()} for rank, links in self.of.items()}

    def heal(self) -> None:
        """Opens all."""
        for links in self.of.values():
            for link in links.values():
                link.heal()

    def close(self) -> None:
        """Ends the thread; connections end with it."""

        async def end() -> None:
            tasks = asyncio.all_tasks(self._loop) - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._loop.call_soon(self._loop.stop)

        asyncio.run_coroutine_threadsafe(end(), self._loop)
        self._thread.join(START_SECONDS)
        self._loop.close()
