"""The files of deploy/kubernetes, as they stand and as kubectl renders them; and the pods that they make."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.tools.launching import ROOT

FILES = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("demo", "gpu")
NAMESPACE = "ps"

Object = dict[str, Any]


def kubectl() -> str | None:
    """The program, of this environment's extra or of this machine; None: there is none."""
    beside = Path(sys.executable).with_name("kubectl")
    return str(beside) if beside.exists() else shutil.which("kubectl")


def render(folder: Path) -> list[Object]:
    """What `kubectl apply -k FOLDER` sends. Raises CalledProcessError with what kubectl says."""
    program = kubectl()
    assert program is not None
    done = subprocess.run([program, "kustomize", str(folder)], capture_output=True, text=True, timeout=60, check=True)
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def read(*paths: Path) -> list[Object]:
    """The objects in files as they stand, each in the namespace into which kustomize puts it."""
    objects = [each for path in paths for each in yaml.safe_load_all(path.read_text()) if each]
    for each in objects:
        each["metadata"].setdefault("namespace", NAMESPACE)
    return [each for each in objects if each["kind"] not in ("Kustomization", "Component")]


def copy_of_the_files(target: Path) -> Path:
    """A copy to change and to render; the dashboard, which is elsewhere, comes along. Returns its deploy/kubernetes."""
    ignored = shutil.ignore_patterns("certs")
    shutil.copytree(FILES, target / "deploy" / "kubernetes", ignore=ignored)
    shutil.copytree(ROOT / "deploy" / "grafana", target / "deploy" / "grafana")
    return target / "deploy" / "kubernetes"


@cache
def base() -> tuple[Object, ...]:
    """The base as its files stand: no kubectl is needed."""
    listed = yaml.safe_load((FILES / "base" / "kustomization.yaml").read_text())["resources"]
    return tuple(read(*(FILES / "base" / name for name in listed)))


@cache
def relays() -> tuple[Object, ...]:
    """The component `relay` as its files stand."""
    folder = FILES / "components" / "relay"
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    return tuple(read(*(folder / name for name in listed)))


def with_groups(objects: Iterable[Object]) -> list[Object]:
    """The objects as the component `groups` patches them: no kubectl is needed for what it asks for."""
    patched = copy.deepcopy(list(objects))
    component = yaml.safe_load((FILES / "components" / "groups" / "kustomization.yaml").read_text())
    for patch in component["patches"]:
        target = patch["target"]
        for each in patched:
            if (
                each["kind"] == target["kind"]
                and target.get("name", each["metadata"]["name"]) == each["metadata"]["name"]
            ):
                for change in yaml.safe_load(patch["patch"]):
                    _replace(each, change)
    return patched


def _replace(inside: Any, change: Object) -> None:
    assert change["op"] == "replace"
    *above, last = [int(key) if key.isdigit() else key for key in change["path"].strip("/").split("/")]
    for key in above:
        inside = inside[key]
    assert inside[last] is not None
    inside[last] = change["value"]


@dataclass(frozen=True)
class Template:
    """The pods that an object makes.

    count:    how many
    metadata: of each, as the template has it
    """

    kind: str
    name: str
    count: int
    metadata: Object
    spec: Object

    @property
    def container(self) -> Object:
        """The one container."""
        [container] = self.spec["containers"]
        return dict(container)


def templates(objects: list[Object] | tuple[Object, ...]) -> Iterator[Template]:
    """The pods of every object that makes some; of a runtime's JobSet, Volcano's tasks and a Ray cluster too."""
    for each in objects:
        kind, name, spec = each["kind"], each["metadata"]["name"], each.get("spec", {})
        if kind == "RayJob":
            cluster = spec["rayClusterSpec"]
            yield _template(kind, "head", 1, cluster["headGroupSpec"])
            for group in cluster["workerGroupSpecs"]:
                yield _template(kind, group["groupName"], group["replicas"], group)
        elif "tasks" in spec:  # Volcano's Job
            for task in spec["tasks"]:
                yield _template(f"Volcano{kind}", task["name"], task["replicas"], task)
        elif kind in ("Deployment", "StatefulSet", "Job"):
            count = spec.get("replicas", spec.get("completions"))
            yield _template(kind, name, count, spec)
        elif kind == "ClusterTrainingRuntime":
            for job in spec["template"]["spec"]["replicatedJobs"]:
                inner = job["template"]["spec"]
                yield _template(kind, job["name"], inner["completions"], inner)


def _template(kind: str, name: str, count: int, spec: Object) -> Template:
    template = copy.deepcopy(spec["template"])
    for claim in spec.get("volumeClaimTemplates", []):  # as the controller does, with the pod's number for {index}
        volume = claim["metadata"]["name"]
        source = {"persistentVolumeClaim": {"claimName": f"{volume}-{name}-{{index}}"}}
        template["spec"]["volumes"].append({"name": volume, **source})
    return Template(kind, name, count, template.get("metadata", {}), template["spec"])


def one(objects: list[Object] | tuple[Object, ...], kind: str, name: str) -> Object:
    """The object of that kind and name."""
    [found] = [each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found
