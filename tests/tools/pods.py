"""Runs the pods of Kubernetes objects as processes: what a kubelet and the controllers do, as far as it is needed.

Each pod gets its arguments, its variables (the downward API among them), its volumes, its name in the others' hosts
file and its probes from the objects. Secrets are issued for the names in the objects' Certificates. A pod that ends is
replaced, as a Deployment, a StatefulSet and a Job do: with an address of its own, and empty emptyDirs.

Where it runs is a `Place`: `container_place.py` has network namespaces, another user and a read-only root;
`LoopbackPlace` has nothing but addresses of this machine's loopback, so it runs everywhere.
"""

from __future__ import annotations

import datetime
import http.client
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ps_server.ops import dev_certs
from tests.tools.kubernetes import NAMESPACE, Object, Template, templates
from tests.tools.launching import ROOT, environment, kill_family

DOMAIN = f"{NAMESPACE}.svc.cluster.local"
START_SECONDS = 180.0
END_SECONDS = 60.0
LOOK_SECONDS = 0.25  # a look is a call to each pod
IMAGE_VARIABLES = {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/tmp", "MPLCONFIGDIR": "/tmp/mpl"}
WORKING_DIRECTORY = "/app"


@dataclass(frozen=True)
class Mount:
    """A volume where a pod sees it.

    source: what is mounted; memory: bytes of a file system in memory, or 0
    """

    path: str
    source: Path
    is_read_only: bool
    memory: int = 0


@dataclass
class Pod:
    """A pod while it runs, and when it has ended.

    slot: the number of its address; of: the template that it is made from, index: which of its pods it is
    """

    name: str
    of: Template
    index: int
    slot: int
    address: str
    folder: Path
    process: subprocess.Popen[bytes] = field(init=False)

    @property
    def log(self) -> str:
        """What it has written so far."""
        return (self.folder / "log").read_text(errors="replace")


@dataclass(frozen=True)
class Order:
    """What a place is to start: words, variables, mounts, and the user and group."""

    words: list[str]
    variables: dict[str, str]
    mounts: list[Mount]
    user: int
    group: int


class Place(Protocol):
    """Where pods run."""

    def address(self, slot: int) -> str:
        """The address of a pod."""

    def start(self, pod: Pod, order: Order) -> subprocess.Popen[bytes]:
        """Starts the container of a pod."""

    def main(self, pod: Pod) -> int:
        """The process of a container that gets its signals."""

    def command(self, pod: Pod, words: list[str]) -> list[str]:
        """What runs a command in a pod that runs, as `kubectl exec` does."""

    def call(self, function: Callable[[], int]) -> int:
        """What a function returns on the node, from which probes come."""

    def name(self, names: Mapping[str, str]) -> None:
        """Gives addresses to names, for all pods."""


class Pods:
    """All pods of some objects."""

    def __init__(self, objects: list[Object], folder: Path, place: Place) -> None:
        self._objects = objects
        self._folder = folder
        self._place = place
        self._slots = 0
        self.replaced: list[str] = []
        self.ended: dict[str, int] = {}
        self._issue_secrets()
        self._pods = [self._make(of, index) for of in templates(objects) for index in range(of.count)]
        self._tell_names()
        for pod in self._pods:
            self._start(pod)

    # -- what runs -----------------------------------------------------------------------------------------------------

    def of(self, name: str) -> list[Pod]:
        """The pods of a template that run now, or have run to their end."""
        return [pod for pod in self._pods if pod.of.name == name]

    def tend(self) -> None:
        """Replaces pods that have ended, as their controllers do; a Job's that ended with 0 stays ended."""
        for place, pod in enumerate(self._pods):
            code = pod.process.poll()
            if code is None or pod.name in self.ended:
                continue
            if pod.of.kind == "Job" and code == 0:
                self.ended[pod.name] = code
                continue
            if pod.of.kind == "Job":
                failures = sum(name == pod.name for name in self.replaced)
                limit = self._object(pod).get("spec", {})["backoffLimitPerIndex"]
                assert failures < limit, f"{pod.name} ended with {code} too often\n{pod.log}"
            self.replaced.append(pod.name)
            self._pods[place] = self._make(pod.of, pod.index)
            self._tell_names()
            self._start(self._pods[place])

    def start_again(self, pod: Pod) -> Pod:
        """Starts a Job's pod that has ended with 0 once more, as for an index whose node was lost at the end."""
        again = self._make(pod.of, pod.index)
        self._pods[self._pods.index(pod)] = again
        del self.ended[pod.name]
        self._tell_names()
        self._start(again)
        return again

    def until(self, condition: Callable[[], object], what: str, seconds: float = START_SECONDS) -> None:
        """Tends the pods until a condition holds."""

        deadline, pause = time.monotonic() + seconds, threading.Event()
        self.tend()
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come true in {seconds:g} s\n{self.logs()}"
            pause.wait(LOOK_SECONDS)
            self.tend()

    def logs(self) -> str:
        """The last lines of each pod."""
        return "\n".join(f"--- {pod.name}\n{pod.log[-3000:]}" for pod in self._pods)

    def kill(self, pod: Pod) -> None:
        """Kills a pod's container, as a node that fails does."""
        os.kill(self._place.main(pod), signal.SIGKILL)
        pod.process.wait(END_SECONDS)

    def run_in(self, pod: Pod, *words: str) -> subprocess.CompletedProcess[str]:
        """`kubectl exec POD -- WORDS`."""
        command = self._place.command(pod, list(words))
        return subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=END_SECONDS, check=False
        )

    def end(self) -> dict[str, int]:
        """Tells all servers to end; their codes."""
        running = [pod for pod in self._pods if pod.process.poll() is None]
        for pod in running:
            os.kill(self._place.main(pod), signal.SIGTERM)
        grace = max((pod.of.spec["terminationGracePeriodSeconds"] for pod in running), default=0)
        deadline = time.monotonic() + grace
        return {pod.name: pod.process.wait(max(0.1, deadline - time.monotonic())) for pod in running}

    def close(self) -> None:
        """Leaves nothing behind."""
        for pod in self._pods:
            if pod.process.poll() is None:
                kill_family(pod.process.pid)
                pod.process.wait(END_SECONDS)

    def process_of(self, pod: Pod) -> Path:
        """The folder of /proc of a container's first process."""
        return Path("/proc") / str(self._place.main(pod))

    # -- probes --------------------------------------------------------------------------------------------------------

    def passes(self, pod: Pod, probe: str) -> bool:
        """Whether a probe of a pod succeeds now."""
        asked = pod.of.container[probe]
        ports = {each["name"]: each["containerPort"] for each in pod.of.container["ports"]}
        port, path = ports[asked["httpGet"]["port"]], asked["httpGet"]["path"]

        def get() -> int:
            connection = http.client.HTTPConnection(pod.address, port, timeout=asked.get("timeoutSeconds", 1))
            try:
                connection.request("GET", path)
                return connection.getresponse().status
            except OSError:
                return 0
            finally:
                connection.close()

        return 200 <= self._place.call(get) < 400

    # -- how a pod is made ---------------------------------------------------------------------------------------------

    def _make(self, of: Template, index: int) -> Pod:
        slot, self._slots = self._slots, self._slots + 1
        name = f"{of.name}-{index}"
        folder = self._folder / f"{slot}-{name}"
        folder.mkdir(mode=0o755)
        return Pod(name, of, index, slot, self._place.address(slot), folder)

    def _start(self, pod: Pod) -> None:
        pod.process = self._place.start(pod, self._order(pod))

    def _order(self, pod: Pod) -> Order:
        container, security = pod.of.container, pod.of.spec["securityContext"]
        user, group = security["runAsUser"], security["fsGroup"]
        variables = {**IMAGE_VARIABLES, **self._variables(pod)}

        def filled(word: str) -> str:
            return re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], word)

        variables = {name: filled(value) for name, value in variables.items()}
        words = [*container.get("command", ["ps-server"]), *container["args"]]
        return Order([filled(word) for word in words], variables, list(self._mounts(pod, user, group)), user, group)

    def _variables(self, pod: Pod) -> dict[str, str]:
        found = {"JOB_COMPLETION_INDEX": str(pod.index)} if pod.of.kind == "Job" else {}
        labels = {
            **pod.of.metadata.get("labels", {}),
            "apps.kubernetes.io/pod-index": str(pod.index),
            "batch.kubernetes.io/controller-uid": f"uid-of-{pod.of.name}",
        }
        fields = {"metadata.namespace": NAMESPACE, "metadata.name": pod.name}
        fields |= {f"metadata.labels['{name}']": value for name, value in labels.items()}
        for each in pod.of.container.get("env", []):
            source = each.get("valueFrom", {})
            if "fieldRef" in source:
                found[each["name"]] = fields[source["fieldRef"]["fieldPath"]]
            elif "resourceFieldRef" in source:
                part, _, name = source["resourceFieldRef"]["resource"].partition(".")
                found[each["name"]] = str(pod.of.container["resources"][part][name])
            else:
                found[each["name"]] = each["value"]
        return found

    def _mounts(self, pod: Pod, user: int, group: int) -> Iterator[Mount]:
        volumes = {each["name"]: each for each in pod.of.spec["volumes"]}
        for mount in pod.of.container["volumeMounts"]:
            volume = volumes[mount["name"]]
            source, memory = self._volume(pod, mount["name"], volume), 0
            if volume.get("emptyDir", {}).get("medium") == "Memory":
                memory = _bytes(volume["emptyDir"]["sizeLimit"])
            yield Mount(mount["mountPath"], source, bool(mount.get("readOnly")), memory)
            _give_to(source, group)

    def _volume(self, pod: Pod, name: str, volume: Object) -> Path:
        if "secret" in volume:
            source = self._folder / "secrets" / volume["secret"]["secretName"]
            return _copy(source, pod.folder / name, volume["secret"]["defaultMode"])
        if "configMap" in volume:
            source = self._folder / "config" / volume["configMap"]["name"]
            source.mkdir(parents=True, exist_ok=True)
            for key, text in self._config(volume["configMap"]["name"]).items():
                (source / key).write_text(text)
            return _copy(source, pod.folder / name, volume["configMap"]["defaultMode"])
        if "persistentVolumeClaim" in volume:
            folder = self._folder / "claims" / volume["persistentVolumeClaim"]["claimName"].format(index=pod.index)
        else:
            assert "emptyDir" in volume
            folder = pod.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _config(self, name: str) -> dict[str, str]:
        [found] = [each for each in self._objects if (each["kind"], each["metadata"]["name"]) == ("ConfigMap", name)]
        return dict(found["data"])

    def _object(self, pod: Pod) -> Object:
        kinds = (pod.of.kind, pod.of.name)
        [found] = [each for each in self._objects if (each["kind"], each["metadata"]["name"]) == kinds]
        return found

    # -- names and secrets ---------------------------------------------------------------------------------------------

    def _tell_names(self) -> None:
        names = {}
        for service in self._objects:
            if service["kind"] != "Service":
                continue
            name, selector = service["metadata"]["name"], service["spec"]["selector"].items()
            for pod in self._pods:
                if selector <= pod.of.metadata["labels"].items():
                    is_headless = service["spec"].get("clusterIP") == "None"
                    names[f"{pod.name}.{name}.{DOMAIN}" if is_headless else f"{name}.{DOMAIN}"] = pod.address
        self._place.name(names)

    def _issue_secrets(self) -> None:
        """What cert-manager makes of the Certificates, by the code of `ps-server dev-certs`."""
        folder = self._folder / "secrets"
        life = datetime.timedelta(days=1)
        authority = dev_certs._Authority.make(folder / "ca", life)
        for each in self._objects:
            spec = each.get("spec", {})
            if each["kind"] == "Certificate" and not spec.get("isCA"):
                names = tuple(spec["dnsNames"]) + self._more_names(spec)
                holder = dev_certs.Holder("tls", spec["commonName"], "", spec["secretName"], names)
                dev_certs._issue(folder, holder, authority, life)
                (folder / spec["secretName"] / "tls.pem").rename(folder / spec["secretName"] / "tls.crt")
                shutil.copy(folder / "ca" / "ca.pem", folder / spec["secretName"] / "ca.crt")

    def _more_names(self, spec: Object) -> tuple[str, ...]:
        return tuple(getattr(self._place, "also_named", ()))


def _bytes(text: str) -> int:
    factor = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}[text[-2:]]
    return int(text[:-2]) * factor


def _copy(source: Path, target: Path, mode: int) -> Path:
    """A pod's own copy of the files of a Secret or a ConfigMap, with the mode that it asks for."""
    shutil.copytree(source, target)
    for path in target.iterdir():
        path.chmod(mode)
    return target


def _give_to(folder: Path, group: int) -> None:
    """What fsGroup does: the volume is the group's."""
    if os.geteuid() == 0:
        for path in (folder, *folder.iterdir()):
            os.chown(path, -1, group)
        folder.chmod(0o2770)


class LoopbackPlace:
    """This machine's loopback, this user, this Python: each pod has an address of its own there, and no name.

    So names stand as addresses in words and variables, and volumes where they are on this machine.
    """

    _ADDRESSES = "127.0.77."

    def __init__(self, folder: Path, most: int) -> None:
        self._folder = folder
        self._names: dict[str, str] = {}
        self._orders: dict[str, dict[str, str]] = {}
        self.also_named = tuple(self.address(slot) for slot in range(most))

    def address(self, slot: int) -> str:
        """The address of a pod."""
        return f"{self._ADDRESSES}{slot + 1}"

    def name(self, names: Mapping[str, str]) -> None:
        """Remembers names: a name keeps its first address, because it stands in what others were told."""
        self._names = {**names, **self._names}

    def start(self, pod: Pod, order: Order) -> subprocess.Popen[bytes]:
        """Starts the container's command as it is."""
        if pod.name in [name.partition(".")[0] for name in self._names]:
            pod.address = next(at for name, at in self._names.items() if name.startswith(f"{pod.name}."))
        here = {mount.path: str(mount.source) for mount in order.mounts}
        paths = "|".join(sorted(here, key=len, reverse=True))

        def translated(word: str) -> str:
            for name, address in self._names.items():
                word = word.replace(name, address)
            word = re.sub(rf"(^|=)({paths})(?=/|$)", lambda found: found[1] + here[found[2]], word)
            return word.replace("0.0.0.0", pod.address)

        app = pod.folder / "app"
        app.mkdir()
        (app / "examples").symlink_to(ROOT / "examples")
        (app / "runs").mkdir()
        program, *words = map(translated, order.words)
        own = {name: translated(value) for name, value in order.variables.items() if name != "HOME"}
        own["PS_METRICS_HOST"] = pod.address
        self._orders[pod.name] = own
        with (pod.folder / "log").open("wb") as log:
            command = [sys.executable, "-m", program.replace("-", "_"), *words]
            return subprocess.Popen(command, cwd=app, env=environment(**own), stdout=log, stderr=log)

    def main(self, pod: Pod) -> int:
        """The process itself."""
        return pod.process.pid

    def command(self, pod: Pod, words: list[str]) -> list[str]:
        """The same with the pod's variables."""
        program, *rest = words
        for name, address in self._names.items():
            rest = [word.replace(name, address) for word in rest]
        variables = [f"{name}={value}" for name, value in self._orders[pod.name].items()]
        return ["env", *variables, sys.executable, "-m", program.replace("-", "_"), *rest]

    def call(self, function: Callable[[], int]) -> int:
        """What the function returns."""
        return function()


def wait_ready(pods: Pods, *names: str) -> None:
    """Waits until every pod of these templates passes its probes, as a kubelet asks: first startup, then readiness."""
    for name in names:
        for probe in ("startupProbe", "readinessProbe"):

            def passes(name: str = name, probe: str = probe) -> bool:
                return all(pods.passes(pod, probe) for pod in pods.of(name))

            pods.until(passes, f"{probe} of {name}")
