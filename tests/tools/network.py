"""A real network of this machine's own: hosts that are network namespaces, on a switch that leads nowhere else."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import pytest

_CLONE_NEWNET = 0x40000000
T = TypeVar("T")


class Network:
    """A switch, which leads nowhere else, and hosts on it at 10.78.0.1, .2, and so on; gone with the `with`."""

    def __init__(self, hosts: int) -> None:
        self._switch = f"ps{os.getpid()}s"
        self._hosts = [f"ps{os.getpid()}h{number}" for number in range(hosts)]

    def __enter__(self) -> Network:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        ip(f"netns add {self._switch}")
        ip(f"-n {self._switch} link add br0 type bridge")
        ip(f"-n {self._switch} link set br0 up")
        for number, host in enumerate(self._hosts):
            ip(f"netns add {host}")
            ip(f"link add p{number} netns {self._switch} type veth peer name eth0 netns {host}")
            ip(f"-n {self._switch} link set p{number} master br0 up")
            ip(f"-n {host} addr add {self.address(number)}/24 dev eth0")
            ip(f"-n {host} link set eth0 up")
            ip(f"-n {host} link set lo up")

    def __exit__(self, *_: object) -> None:
        for name in [*self._hosts, self._switch]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def address(self, host: int) -> str:
        """A host's."""
        return f"10.78.0.{host + 1}"

    def cut(self, host: int) -> None:
        """Pulls a host's cable."""
        ip(f"-n {self._switch} link set p{host} down")

    def heal(self, host: int) -> None:
        """Plugs it in again."""
        ip(f"-n {self._switch} link set p{host} up")

    def name(self, host: int) -> str:
        """A host's network namespace."""
        return self._hosts[host]


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)


@contextmanager
def network_of(hosts: int) -> Iterator[Network]:
    """A network of so many hosts; skips the test where there can be none, and says why."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need `ip`, of iproute2")
    with ExitStack() as stack:
        try:
            made = stack.enter_context(Network(hosts))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
        yield made


def in_network(name: str, function: Callable[[], T]) -> T:
    """What a function returns, or raises, in a thread that is in a network namespace."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            namespace = os.open(f"/run/netns/{name}", os.O_RDONLY)
            try:
                libc = ctypes.CDLL(None, use_errno=True)
                assert libc.setns(namespace, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
            finally:
                os.close(namespace)
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
