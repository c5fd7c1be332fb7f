"""Bare gRPC that answers every message with itself: the ceiling of what gRPC in Python can move."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures

import grpc

from bench.cluster import HERE, START_SECONDS
from bench.results import MIB
from bench.talk import answer, end, own_output

MESSAGE = 4 * MIB
IN_FLIGHT = 4  # for each server
THREADS = 16
OPTIONS = [
    ("grpc.max_receive_message_length", 2 * MESSAGE),
    ("grpc.max_send_message_length", 2 * MESSAGE),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.so_reuseport", 0),
]


@contextlib.contextmanager
def echo_servers(count: int) -> Iterator[list[str]]:
    """Processes that do nothing but echo; yields their addresses."""
    running = [HERE.start("bench.echo") for _ in range(count)]
    try:
        yield [f"{HERE.address}:{answer(process, START_SECONDS)}" for process in running]
    finally:
        end(running)


def echo(addresses: Sequence[str], size: int) -> Callable[[], None]:
    """A function that has `size` bytes echoed, in messages spread over the servers, and returns when all are back."""
    calls = [grpc.insecure_channel(address, options=OPTIONS).unary_unary("/bench.Echo/Echo") for address in addresses]
    pools = [futures.ThreadPoolExecutor(IN_FLIGHT) for _ in addresses]
    payload = bytes(min(MESSAGE, -(-size // len(calls))))
    messages = -(-size // len(payload))

    def step() -> None:
        pending = [pools[index % len(calls)].submit(calls[index % len(calls)], payload) for index in range(messages)]
        for future in pending:
            future.result()

    return step


def main() -> None:
    """Serves until there is no more input."""
    say = own_output()
    server = grpc.server(futures.ThreadPoolExecutor(THREADS), options=OPTIONS)
    handler = grpc.unary_unary_rpc_method_handler(lambda request, _: request)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Echo", {"Echo": handler}),))
    port = server.add_insecure_port(f"{HERE.address}:0")
    server.start()
    say(port)
    sys.stdin.read()


if __name__ == "__main__":
    main()
