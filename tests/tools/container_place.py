"""Pods in containers of this machine's own: a network namespace each, another user, and a root that only can be read.

The root holds what an image has (the system's libraries, this Python and its packages, the examples), each mounted so
that it can only be read; beside it, nothing but the pod's volumes. No program but those of util-linux and iproute2 is
needed, and the user of the pods need not be able to read this Python where it lies.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from tests.tools.launching import ROOT
from tests.tools.network import Network, in_network
from tests.tools.pods import WORKING_DIRECTORY, Mount, Order, Pod

NODE = 0  # of the network's hosts: where probes come from
_NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private")
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_PROGRAMS = {
    "ps-server": "from ps_server.__main__ import program\nprogram()\n",
    "ps-worker": "from ps_worker.cli import main\nmain()\n",
}
_PACKAGES = "/opt/packages"
_BIN = "/opt/bin"


def missing() -> str | None:
    """Why there can be no containers here; None if there can. A network's own reasons come beside it."""
    for program in ("unshare", "nsenter", "setpriv", "chroot", "mount"):
        if shutil.which(program) is None:
            return f"containers need `{program}`"
    tried = subprocess.run([*_NAMESPACES, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False)
    return None if tried.returncode == 0 else f"containers cannot be made here: {tried.stderr.decode().strip()}"


class ContainerPlace:
    """Each pod is a host of the network; `image` is what every container has."""

    def __init__(self, folder: Path, network: Network) -> None:
        self._network = network
        self._folder = folder
        self._etc = folder / "etc"
        self._orders: dict[str, Order] = {}
        reason = missing()
        if reason is not None:
            pytest.skip(reason)
        self._make_image()

    def _make_image(self) -> None:
        self._etc.mkdir()
        self.name({})
        (self._etc / "passwd").write_text("root:x:0:0::/:/bin/sh\nps:x:10001:10001::/tmp:/bin/false\n")
        (self._etc / "group").write_text("root:x:0:\nps:x:10001:\n")
        (self._etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
        shutil.copy("/etc/ld.so.cache", self._etc)
        programs = self._folder / "bin"
        programs.mkdir()
        python = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
        assert python.exists(), f"{python} is not this Python"
        for name, text in _PROGRAMS.items():
            (programs / name).write_text(f"#!{python}\n{text}")
            (programs / name).chmod(0o755)
        base = Path(sys.base_prefix)
        outside = [Path(each) for each in sys.path if each and Path(each).is_dir()]
        self._packages = [ROOT, *(each for each in outside if base not in each.parents and each != ROOT)]

    def address(self, slot: int) -> str:
        """The address of a pod."""
        return self._network.address(slot + 1)

    def name(self, names: Mapping[str, str]) -> None:
        """Writes the hosts file that all pods see."""
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in names.items())]
        (self._etc / "hosts").write_text("\n".join(lines) + "\n")

    def start(self, pod: Pod, order: Order) -> subprocess.Popen[bytes]:
        """Makes the container's root, and starts its command in it."""
        self._orders[pod.name] = order
        root = pod.folder / "root"
        root.mkdir()
        script = "\n".join(["set -eu", *self._mounting(root, order.mounts), f"exec {self._entering(order, root)}"])
        (pod.folder / "start.sh").write_text(script + "\n")
        inside = ("ip", "netns", "exec", self._network.name(pod.slot + 1), *_NAMESPACES)
        with (pod.folder / "log").open("wb") as log:
            return subprocess.Popen([*inside, "sh", str(pod.folder / "start.sh")], stdout=log, stderr=log)

    def main(self, pod: Pod) -> int:
        """The first process of the container: it gets signals as a container's does, with no init before it."""
        return int(psutil.Process(pod.process.pid).children()[0].pid)

    def command(self, pod: Pod, words: list[str]) -> list[str]:
        """Enters the container's namespaces and its root, as its user."""
        target = self.main(pod)
        inside = ("nsenter", f"--target={target}", "--mount", "--net", "--pid", f"--root=/proc/{target}/root", "--wd=/")
        return [*inside, *self._as_user(self._orders[pod.name]), *words]

    def call(self, function: Callable[[], int]) -> int:
        """Calls it on the node."""
        return in_network(self._network.name(NODE), function)

    def _entering(self, order: Order, root: Path) -> str:
        return shlex.join(["chroot", str(root), *self._as_user(order), *order.words])

    def _as_user(self, order: Order) -> list[str]:
        """Without root's capabilities, and without a way to get them back."""
        packages = ":".join(f"{_PACKAGES}/{number}" for number in range(len(self._packages)))
        own = {**order.variables, "PATH": f"{_BIN}:/usr/bin:/bin", "PYTHONPATH": packages}
        user = [f"--reuid={order.user}", f"--regid={order.group}", f"--groups={order.group}"]
        dropped = ["--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all", "--no-new-privs"]
        variables = [f"{name}={value}" for name, value in own.items()]
        return ["env", f"--chdir={WORKING_DIRECTORY}", "-i", *variables, "setpriv", *user, *dropped, "--"]

    def _mounting(self, root: Path, mounts: list[Mount]) -> Iterator[str]:
        yield f"mount -t tmpfs -o mode=0755,nodev tmpfs {root}"
        for path in map(Path, _SYSTEM):
            if path.is_symlink():
                yield f"cp -P {path} {root}{path}"
            elif path.exists():
                yield from _bind(path, root, str(path), True)
        if not sys.base_prefix.startswith("/usr"):
            yield from _bind(Path(sys.base_prefix), root, sys.base_prefix, True)
        for number, path in enumerate(self._packages):
            yield from _bind(path, root, f"{_PACKAGES}/{number}", True)
        yield from _bind(self._folder / "bin", root, _BIN, True)
        yield from _bind(self._etc, root, "/etc", True)
        yield from _bind(ROOT / "examples", root, f"{WORKING_DIRECTORY}/examples", True)
        yield f"mkdir -p {root}/proc {root}/dev/shm"
        yield f"mount -t proc proc {root}/proc"
        for device in ("null", "zero", "random", "urandom"):
            yield f"touch {root}/dev/{device}; mount --bind /dev/{device} {root}/dev/{device}"
        yield f"mount -t tmpfs -o size=64m,mode=1777 shm {root}/dev/shm"
        for mount in mounts:
            if mount.memory:
                yield f"mount -t tmpfs -o size={mount.memory},mode=1777 tmpfs {root}{mount.path}"
            else:
                yield from _bind(mount.source, root, mount.path, mount.is_read_only)
        yield f"mount -o remount,ro {root}"


def _bind(source: Path, root: Path, target: str, is_read_only: bool) -> Iterator[str]:
    yield f"mkdir -p {root}{target}; mount --bind {shlex.quote(str(source))} {root}{target}"
    if is_read_only:
        yield f"mount -o remount,bind,ro {root}{target}"
