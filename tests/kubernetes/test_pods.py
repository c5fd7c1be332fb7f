"""The pods run, from the objects that kubectl renders, as a cluster would run them: see tests/tools/pods.py.

Not held here: scheduling, the network plugin, NetworkPolicy, limits of CPU and memory, seccomp, and cert-manager.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.tools.container_place import ContainerPlace
from tests.tools.kubernetes import (
    FILES,
    Object,
    base,
    copy_of_the_files,
    kubectl,
    one,
    read,
    relays,
    render,
    with_groups,
)
from tests.tools.launching import kill_family
from tests.tools.network import network_of
from tests.tools.pods import END_SECONDS, LoopbackPlace, Place, Pods, wait_ready

USER = 10001
MOST_PODS = 14  # with those that replace others
# The manifests' training, smaller, and with checkpoints so often that there is one when the shard is killed.
STEPS, EVERY = 3000, "2s"
TINY = ["--batch-size=2", "--layers=1", "--heads=2", "--width=16", "--block=8"]
OVERLAY = """
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [../../base]
components: [../../components/cert-manager, ../../components/relay]
namespace: ps
replicas: [{name: shards, count: 2}]
replacements: [{path: wiring.yaml}]
"""


def smaller(objects: list[Object]) -> list[Object]:
    """The same objects, with other numbers."""
    changed = copy.deepcopy(objects)
    worker = one(changed, "Job", "workers")["spec"]["template"]["spec"]["containers"][0]
    worker["args"] = [re.sub(r"^--steps=.*", f"--steps={STEPS}", each) for each in worker["args"]] + TINY
    server = one(changed, "Deployment", "coordinator")["spec"]["template"]["spec"]["containers"][0]
    server["args"] = [re.sub(r"^--checkpoint-every=.*", f"--checkpoint-every={EVERY}", each) for each in server["args"]]
    return changed


@contextmanager
def running(objects: list[Object], folder: Path, place: Place) -> Iterator[Pods]:
    pods = Pods(smaller(objects), folder, place)
    try:
        yield pods
    finally:
        pods.close()


def a_relay_hands_on(pods: Pods) -> None:
    """A relay is known by its certificate at another one, which has the job from the servers by its own."""
    near, far = pods.of("relays")
    asked = ("status", "--server", f"{far.name}.relays.ps.svc.cluster.local:50051", "--json")

    def lists_the_job() -> bool:
        told = pods.run_in(near, "ps-server", *asked)
        assert told.returncode == 0, told.stderr
        return '"default"' in told.stdout

    pods.until(lists_the_job, "the job at a relay")


def trains_through_the_death_of_a_shard(pods: Pods) -> None:
    """All servers are ready; a killed shard comes back from a checkpoint; all workers, and then all servers, end."""
    wait_ready(pods, "coordinator", "shards", "relays")
    [coordinator] = pods.of("coordinator")
    address = "coordinator.ps.svc.cluster.local:50051"

    def reaches_both() -> bool:  # a shard that is ready may be slow to answer the coordinator
        said = pods.run_in(coordinator, "ps-server", "status", "--server", address, "--json")
        assert said.returncode == 0, said.stderr
        shards = json.loads(said.stdout)["shards"]
        return [(shard["index"], shard["reachable"]) for shard in shards] == [(0, True), (1, True)]

    pods.until(reaches_both, "both shards")
    pods.until(lambda: len(re.findall(r"checkpoint \d+ at clock", coordinator.log)) >= 2, "two checkpoints")
    a_relay_hands_on(pods)
    assert not pods.ended, f"the workers were done before the shard was killed: raise STEPS\n{pods.logs()}"
    pods.kill(pods.of("shards")[1])
    pods.until(lambda: "rolled back to checkpoint" in coordinator.log, "the rollback")
    assert pods.replaced == ["shards-1"]
    pods.until(lambda: len(pods.ended) == 2, "the end of both workers")
    assert pods.ended == {"workers-0": 0, "workers-1": 0}
    assert pods.replaced == ["shards-1"], "no worker was started again"
    late = pods.start_again(pods.of("workers")[0])
    pods.until(lambda: len(pods.ended) == 2, "the end of a worker that comes late")
    assert "has finished" in late.log, pods.logs()
    assert pods.replaced == ["shards-1"], "it ends with 0"
    assert all(pods.passes(pod, "livenessProbe") for pod in [coordinator, *pods.of("shards"), *pods.of("relays")])
    assert pods.end() == {"coordinator-0": 0, "shards-0": 0, "shards-1": 0, "relays-0": 0, "relays-1": 0}
    assert "Traceback" not in pods.logs()


def as_they_stand() -> list[Object]:
    return [*base(), *relays(), *read(*sorted((FILES / "components" / "cert-manager").glob("[ac]*.yaml")))]


@pytest.mark.long
@pytest.mark.timeout(480)
def test_the_commands_of_the_pods_train_through_the_death_of_a_shard(tmp_path: Path) -> None:
    """The twin of the test below that needs nothing: the same commands on loopback."""
    with running(as_they_stand(), tmp_path, LoopbackPlace(tmp_path, MOST_PODS)) as pods:
        trains_through_the_death_of_a_shard(pods)


@pytest.mark.kubernetes
@pytest.mark.netns
@pytest.mark.timeout(480)
def test_pods_without_root_or_a_root_to_write_to_train_through_the_death_of_a_shard(
    tmp_path: Path,
) -> None:
    if kubectl() is None:
        pytest.skip("kubectl is not here: pip install --group kubernetes")
    files = copy_of_the_files(tmp_path / "files")
    overlay = files / "overlays" / "test"
    overlay.mkdir()
    (overlay / "kustomization.yaml").write_text(OVERLAY)
    (overlay / "wiring.yaml").write_text((files / "overlays" / "demo" / "wiring.yaml").read_text())
    (tmp_path / "pods").mkdir()
    with network_of(1 + MOST_PODS) as network:
        place = ContainerPlace(tmp_path / "pods", network)
        with running(render(overlay), tmp_path / "pods", place) as pods:
            wait_ready(pods, "coordinator")
            for pod in (*pods.of("coordinator"), *pods.of("shards"), *pods.of("workers")):
                process = pods.process_of(pod)
                pods.until(lambda process=process: owner(process) == USER, "the user", END_SECONDS)  # type: ignore[misc]
                status = (process / "status").read_text()
                assert re.search(r"^CapEff:\s+0+$", status, re.MULTILINE), "it has no capability"
                assert re.search(r"^CapBnd:\s+0+$", status, re.MULTILINE), "and cannot get any"
                assert re.search(r"^NoNewPrivs:\s+1$", status, re.MULTILINE)
                for path in ("/new", "/app/new", "/certs/new", "/usr/new"):
                    refused = pods.run_in(pod, "touch", path)
                    assert "Read-only file system" in refused.stderr, (pod.name, path, refused.stderr)
            trains_through_the_death_of_a_shard(pods)


GROUPS = ["--steps=100000", "--checkpoint-every=10", "--batch-size=1", "--width=16", "--hidden=32", "--block=8"]


@pytest.mark.long
@pytest.mark.timeout(480)
def test_a_pod_that_is_a_group_starts_it_again_as_a_whole_and_comes_back_itself(tmp_path: Path) -> None:
    """The component `groups` over the base, on loopback: a member is killed, and then a whole pod."""
    objects = with_groups([*base(), *read(*sorted((FILES / "components" / "cert-manager").glob("[ac]*.yaml")))])
    arguments = one(objects, "Job", "workers")["spec"]["template"]["spec"]["containers"][0]["args"]
    arguments += GROUPS
    pods = Pods(objects, tmp_path, LoopbackPlace(tmp_path, MOST_PODS))
    try:
        wait_ready(pods, "coordinator", "shards")
        [coordinator], [_, other] = pods.of("coordinator"), pods.of("workers")

        def joined() -> list[int]:
            return [int(clock) for clock in re.findall(r"worker 1 joins at clock (\d+)", coordinator.log)]

        def steps() -> int:
            return len(re.findall(r"step \d+/100000", pods.of("workers")[0].log))

        pods.until(lambda: steps() >= 1, "both groups to train")
        assert joined() == [0]
        members = [
            each for each in psutil.Process(other.process.pid).children(True) if "examples" in str(each.cmdline())
        ]
        assert len(members) == 2
        members[1].kill()
        pods.until(lambda: "its group ends, and is started again" in other.log, "the launcher to see it")
        pods.until(lambda: len(joined()) == 2, "the group")
        assert not members[0].is_running()
        assert pods.replaced == [], "the pod stays"

        joins = steps()
        pods.until(lambda: steps() > joins + 1, "steps of both groups, so that the next join is at a later clock")
        before = steps()
        kill_family(other.process.pid)
        pods.until(lambda: len(joined()) == 3, "another pod with the group")
        assert pods.replaced == ["workers-1"]
        pods.until(lambda: steps() > before + 1, "further steps")
        assert 0 < joined()[1] < joined()[2]
        assert not pods.ended
    finally:
        pods.close()


def owner(process: Path) -> int:
    [found] = re.findall(r"^Uid:\s+(\d+)", (process / "status").read_text(), re.MULTILINE)
    return int(found)
