"""Whether Kubernetes would take what kubectl renders: each object by the schema of its kind, unknown fields refused.

The schemas come with the group `kubernetes`: Kubernetes' own, and the models of cert-manager's, Prometheus' operator's
and Kubeflow Trainer's resources. No API server is asked, so rules that only it knows are not held here.
"""

from __future__ import annotations

import copy
import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tools.kubernetes import (
    FILES,
    OVERLAYS,
    Object,
    copy_of_the_files,
    kubectl,
    one,
    render,
    templates,
    with_groups,
)
from tests.tools.launching import ROOT

pytestmark = pytest.mark.kubernetes
# The oldest that has all fields that the files use, and the newest that is known. PS_INDEX needs a label of 1.28.
VERSIONS = ("1.29.0", "1.37.0")
MODELS = {  # by API group and version: the module, and the text before the kind
    "cert-manager.io/v1": ("cloudcoil.models.cert_manager.v1", ""),
    "monitoring.coreos.com/v1": ("cloudcoil.models.prometheus_operator.v1", ""),
    "jobset.x-k8s.io/v1alpha2": ("kubeflow_trainer_api.models", "JobsetV1alpha2"),
    "trainer.kubeflow.org/v1alpha1": ("kubeflow_trainer_api.models", "TrainerV1alpha1"),
}
# No package has the schemas of these: their pods are held to that of a Pod.
OTHERS = ("kubeflow", "jobset", "groups/jobset", "groups/trainjob", "volcano", "ray")
PODS_ALONE = ("batch.volcano.sh/v1alpha1", "ray.io/v1")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files, with what `dev-certs` makes."""
    if kubectl() is None:
        pytest.skip("kubectl is not here: pip install --group kubernetes")
    copied = copy_of_the_files(tmp_path_factory.mktemp("files"))
    from ps_server.ops import dev_certs

    readme = (FILES / "components" / "dev-certs" / "kustomization.yaml").read_text()
    hosts, relays = (re.findall(rf"--{flag} '?([^\s']+)", readme) for flag in ("host", "relay"))
    dev_certs.write(copied / "components" / "dev-certs" / "certs", hosts, relays=relays)
    for name in OVERLAYS:  # as its page says
        shutil.copytree(copied / "overlays" / name, copied / "overlays" / f"{name}-with-relays")
        overlay = yaml.safe_load(
            (path := copied / "overlays" / f"{name}-with-relays" / "kustomization.yaml").read_text()
        )
        overlay["components"].append("../../components/relay")
        path.write_text(yaml.safe_dump(overlay))
    return copied


@pytest.fixture(scope="module")
def rendered(files: Path) -> dict[str, list[Object]]:
    overlays = [f"overlays/{name}{suffix}" for name in OVERLAYS for suffix in ("", "-with-relays")]
    return {name: render(files / name) for name in (*overlays, *OTHERS)}


def refusals(manifest: Object, version: str) -> list[str]:
    """What is wrong with an object."""
    if manifest["apiVersion"] in PODS_ALONE:
        head = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
        pods = [{**head, "spec": each.spec} for each in templates([manifest])]
        return [wrong for pod in pods for wrong in refusals(pod, version)]
    if manifest["apiVersion"] in MODELS:
        return refusals_of_model(manifest)
    validator = pytest.importorskip("kubernetes_validate", reason="needs pip install --group kubernetes")
    try:
        validator.validate(manifest, version, strict=True)
    except validator.ValidationError as error:
        return [str(error.message)]
    return []


def refusals_of_model(manifest: Object) -> list[str]:
    """The models leave out fields that they do not know: what does not come back is one of those."""
    module, prefix = MODELS[manifest["apiVersion"]]
    model = getattr(pytest.importorskip(module), prefix + manifest["kind"])
    pydantic = pytest.importorskip("pydantic")
    try:
        if hasattr(model, "from_dict"):  # Kubeflow's, which reads quantities and ports by itself
            known = model.from_dict(manifest).to_dict()
        else:
            known = model.model_validate(manifest).model_dump(mode="json", by_alias=True, exclude_unset=True)
    except pydantic.ValidationError as error:
        return [str(each["msg"]) for each in error.errors()]
    return list(lost(manifest, known))


def lost(given: Any, known: Any, place: str = "") -> list[str]:
    """The fields of an object that a model did not keep."""
    if isinstance(given, dict) and isinstance(known, dict):
        missing = [f"{place}.{key} is not known" for key in given.keys() - known.keys()]
        both = given.keys() & known.keys()
        return missing + [each for key in both for each in lost(given[key], known[key], f"{place}.{key}")]
    if isinstance(given, list) and isinstance(known, list) and len(given) == len(known):
        return [each for pair in zip(given, known, strict=True) for each in lost(*pair, place)]
    return [] if given == known else [f"{place}: {given!r} became {known!r}"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "name",
    [
        *(f"overlays/{name}{more}" for name in OVERLAYS for more in ("", "-with-relays")),
        *OTHERS,
    ],
)
def test_kubernetes_takes_every_object(rendered: dict[str, list[Object]], name: str, version: str) -> None:
    objects = rendered[name]
    assert len(objects) > (7 if name != "ray" else 1)
    assert {
        f"{each['kind']} {each['metadata']['name']}": wrong for each in objects if (wrong := refusals(each, version))
    } == {}


def test_the_patch_of_the_page_puts_the_workers_into_a_queue(files: Path) -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    [patch] = re.findall(r"  ```yaml\n(  patches:\n.*?queue-name.*?)  ```", page, re.DOTALL)
    folder = files / "overlays" / "queue"
    folder.mkdir()
    head = "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [../../base]\n"
    (folder / "kustomization.yaml").write_text(head + textwrap.dedent(patch))
    job = one(render(folder), "Job", "workers")
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "QUEUE"
    assert refusals(job, VERSIONS[-1]) == []


def test_without_kubeflow_nothing_of_it_is_applied(rendered: dict[str, list[Object]]) -> None:
    objects = rendered["jobset"]
    assert not [each["kind"] for each in objects if each["apiVersion"].startswith("trainer.kubeflow.org")]
    secrets = {each["spec"]["secretName"] for each in objects if each["kind"] == "Certificate"}
    assert {"ps-server-tls", "ps-worker-tls"} <= secrets


@pytest.mark.parametrize(
    ("name", "kind", "path", "value"),
    [
        ("overlays/demo", "StatefulSet", "spec.replicaz", 2),
        ("overlays/demo", "StatefulSet", "spec.replicas", "two"),
        ("overlays/demo", "Job", "spec.podFailurePolicy.rules", "Ignore"),
        ("overlays/gpu", "Certificate", "spec.dnsNamez", ["a"]),
        ("overlays/gpu", "PodMonitor", "spec.podMetricsEndpoints", 7),
        ("overlays/gpu", "PodMonitor", "spec.podMetricsEndpoint", []),
        ("kubeflow", "ClusterTrainingRuntime", "spec.template.spec.replicas", 2),
        ("kubeflow", "TrainJob", "spec.trainer.numNodes", "two"),
        ("jobset", "JobSet", "spec.replicatedJob", []),
        ("jobset", "JobSet", "spec.replicatedJobs", "one"),
        ("volcano", "Job", "spec.tasks.0.template.spec.containerz", []),
        ("volcano", "Job", "spec.tasks.0.template.spec.restartPolicy", 7),
        ("ray", "RayJob", "spec.rayClusterSpec.headGroupSpec.template.spec.containers.0.imagez", "a"),
        ("ray", "RayJob", "spec.rayClusterSpec.workerGroupSpecs.0.template.spec.volumes", "a"),
    ],
)
def test_what_is_wrong_is_refused(
    rendered: dict[str, list[Object]], name: str, kind: str, path: str, value: object
) -> None:
    """So that the test above can fail."""
    manifest = copy.deepcopy(next(each for each in rendered[name] if each["kind"] == kind))
    *above, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    inside = manifest
    for key in above:
        inside = inside[key]
    inside[last] = value
    assert refusals(manifest, VERSIONS[-1])


def test_the_component_for_groups_changes_the_workers_alone_and_as_the_tests_without_kubectl_take_it(
    files: Path, rendered: dict[str, list[Object]]
) -> None:
    folder = files / "overlays" / "groups"
    shutil.copytree(files / "overlays" / "demo", folder)
    overlay = yaml.safe_load((folder / "kustomization.yaml").read_text())
    overlay["components"].append("../../components/groups")
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    for name, plain, kind in (
        ("overlays/groups", "overlays/demo", "Job"),
        ("groups/jobset", "jobset", "JobSet"),
        ("groups/trainjob", "kubeflow", "TrainJob"),
    ):
        found = render(folder) if name == "overlays/groups" else rendered[name]
        assert found == with_groups(rendered[plain])
        assert [each["kind"] for each in found if each not in rendered[plain]] == [kind]
        assert [wrong for each in found for wrong in refusals(each, VERSIONS[-1])] == []


def test_groups_have_a_gpu_for_each_process_as_the_page_patches_the_overlay(files: Path) -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    [text] = [text for text in re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL) if "/groups" in text]
    folder = files / "overlays" / "gpu-groups"
    shutil.copytree(files / "overlays" / "gpu", folder)
    path = folder / "kustomization.yaml"
    overlay, told = yaml.safe_load(path.read_text()), yaml.safe_load(text)
    others = [each for each in overlay["patches"] if each["target"] != told["patches"][0]["target"]]
    path.write_text(yaml.safe_dump({**overlay, **told, "patches": [*told["patches"], *others]}))
    objects = render(folder)
    [workers] = [each for each in templates(objects) if each.name == "workers"]
    resources = workers.container["resources"]
    assert "--group=2" in workers.container["args"]
    assert resources["limits"]["nvidia.com/gpu"] == 2
    assert resources["requests"]["cpu"] == "4", "as many as the component for GPUs asks for"
    assert workers.count == 4
    assert "--world-size=4" in workers.container["args"]
    assert {"name": "OMP_NUM_THREADS", "value": "2"} in workers.container["env"]
    assert [wrong for each in objects for wrong in refusals(each, VERSIONS[-1])] == []


def test_with_volcano_there_are_its_workers_alone(rendered: dict[str, list[Object]]) -> None:
    jobs = [each for each in rendered["volcano"] if each["kind"] == "Job"]
    assert [each["apiVersion"] for each in jobs] == ["batch.volcano.sh/v1alpha1"]
    [pods], [of_base] = templates(jobs), templates([one(rendered["overlays/demo"], "Job", "workers")])
    assert pods.metadata["labels"] == of_base.metadata["labels"], "by which the network's policies know them"
    assert pods.container["image"] == of_base.container["image"]


def test_the_number_of_shards_and_the_namespace_are_each_written_once(files: Path, tmp_path: Path) -> None:
    changed = copy_of_the_files(tmp_path)
    path = changed / "overlays" / "gpu" / "kustomization.yaml"
    overlay = yaml.safe_load(path.read_text())
    overlay["namespace"], overlay["replicas"] = "elsewhere", [{"name": "shards", "count": 7}]
    path.write_text(yaml.safe_dump(overlay))
    objects = render(path.parent)
    found = {each.name: each for each in templates(objects)}
    assert found["shards"].count == 7
    assert "--shards=7" in found["coordinator"].container["args"]
    namespaces = {each["metadata"].get("namespace", each["metadata"]["name"]) for each in objects}
    assert namespaces == {"elsewhere"}
    names = {
        name: one(objects, "Certificate", name)["spec"]["dnsNames"][0] for name in ("coordinator", "shards", "relays")
    }
    assert one(objects, "Certificate", "relays")["spec"]["dnsNames"][1] == "relays.elsewhere.svc.cluster.local"
    assert names == {
        "coordinator": "coordinator.elsewhere.svc.cluster.local",
        "shards": "*.shards.elsewhere.svc.cluster.local",
        "relays": "*.relays.elsewhere.svc.cluster.local",
    }


def test_the_component_for_relays_adds_them_and_changes_nothing_else(rendered: dict[str, list[Object]]) -> None:
    for name in OVERLAYS:
        without, with_relays = rendered[f"overlays/{name}"], rendered[f"overlays/{name}-with-relays"]
        added = [each for each in with_relays if each not in without]
        assert [each for each in without if each not in with_relays] == []
        assert {each["metadata"]["name"] for each in added} == {"relays", "reads"}
        [pods] = templates(added)
        assert pods.metadata["labels"]["app.kubernetes.io/part-of"] == "ps-torch"
        assert pods.container["image"] == {each.name: each.container["image"] for each in templates(without)}["shards"]


def test_the_overlay_for_gpus_gives_each_worker_one_and_no_server(rendered: dict[str, list[Object]]) -> None:
    found = {each.name: each.container for each in templates(rendered["overlays/gpu"])}
    asked = {name: each["resources"]["limits"].get("nvidia.com/gpu") for name, each in found.items()}
    assert asked == {"coordinator": None, "shards": None, "workers": 1}
    assert found["workers"]["image"] != found["shards"]["image"]
