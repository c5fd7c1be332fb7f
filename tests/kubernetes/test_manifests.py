"""What the files of deploy/kubernetes say, compared with what they are about: no kubectl and no cluster is needed."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

import ps_server.cli
import ps_worker.cli
from ps_runtime.settings import unknown_variables
from ps_server.ops.health_port import LIVE, READY
from tests.tools.kubernetes import FILES, OVERLAYS, Template, base, one, read, relays, templates, with_groups
from tests.tools.launching import ROOT
from tests.tools.prometheus_rule import TARGET, rule

DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
CERT_MANAGER = read(*sorted((FILES / "components" / "cert-manager").glob("[ac]*.yaml")))
KUBEFLOW = read(FILES / "kubeflow" / "runtime.yaml", FILES / "kubeflow" / "train.yaml")
JOBSET = read(FILES / "jobset" / "jobset.yaml")
VOLCANO = read(FILES / "volcano" / "job.yaml")
RAY = read(FILES / "ray" / "rayjob.yaml")
EVERY = [*templates(base()), *templates(relays()), *templates(KUBEFLOW), *templates(VOLCANO)]
SERVERS = [each for each in EVERY if each.name in ("coordinator", "shards", "shard")]
[RELAYS] = templates(relays())
of_every = pytest.mark.parametrize("pods", EVERY, ids=lambda pods: f"{pods.kind}-{pods.name}")
of_processes = pytest.mark.parametrize("pods", [*SERVERS, RELAYS], ids=lambda pods: f"{pods.kind}-{pods.name}")
of_servers = pytest.mark.parametrize("pods", SERVERS, ids=lambda pods: f"{pods.kind}-{pods.name}")
NUMBERS = {"PS_INDEX": "0"}


def variables(pods: Template) -> dict[str, str]:
    """What the container is told, with a value in place of each that Kubernetes fills in."""
    known = {"NAMESPACE": "ps", "POD_NAME": "shards-0", "JOBSET": "char-gpt", **NUMBERS}
    return {each["name"]: each.get("value", known.get(each["name"], "1")) for each in pods.container.get("env", [])}


def words(pods: Template) -> list[str]:
    """The arguments, with variables filled in as Kubernetes does."""
    values = variables(pods)
    return [re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], word) for word in pods.container["args"]]


def parsed(pods: Template, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the command makes of its arguments and variables."""
    for name, value in variables(pods).items():
        monkeypatch.setenv(name, re.sub(r"\$\((\w+)\)", "x", value))
    worker = pods.container.get("command") == ["ps-worker"]
    assert worker or "command" not in pods.container, "the image's entry point is ps-server"
    return (ps_worker.cli if worker else ps_server.cli).parser().read(words(pods))


# -- commands ----------------------------------------------------------------------------------------------------------


@of_every
def test_the_commands_know_every_flag_and_variable_that_a_pod_gives_them(
    pods: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed(pods, monkeypatch)  # ends with code 2 where it does not
    given = {name: value for name, value in os.environ.items() if name.startswith("PS_")}
    assert given
    assert unknown_variables(given) is None


@of_processes
def test_the_ports_of_a_server_are_those_that_its_pod_names(pods: Template, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = parsed(pods, monkeypatch)
    ports = {each["name"]: each["containerPort"] for each in pods.container["ports"]}
    more = {"data": arguments.data_port} if "shard" in pods.name else {}
    if pods is RELAYS:
        more = {"http": arguments.http_port}
    assert ports == {
        "grpc": arguments.port,
        "metrics": arguments.metrics_port,
        "health": arguments.health_port,
        **more,
    }
    assert all(ports.values())
    assert arguments.advertise.endswith(f":{arguments.port}")
    probes = {name: each["httpGet"] for name, each in pods.container.items() if name.endswith("Probe")}
    assert {"startupProbe", "readinessProbe"} <= probes.keys()
    assert {each["port"] for each in probes.values()} == {"health"}
    paths = {"startupProbe": LIVE, "livenessProbe": LIVE, "readinessProbe": READY}
    assert {name: each["path"] for name, each in probes.items()} == {name: paths[name] for name in probes}


@of_servers
def test_a_server_has_time_for_its_last_checkpoint(pods: Template, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pods.spec["terminationGracePeriodSeconds"] >= parsed(pods, monkeypatch).drain_seconds + 15


def test_every_caller_uses_the_address_that_the_coordinator_advertises(monkeypatch: pytest.MonkeyPatch) -> None:
    for objects in ((*base(), *relays()), KUBEFLOW):
        found = {each.name: each for each in templates(objects)}
        coordinator = parsed(found.pop("coordinator"), monkeypatch).advertise
        for pods in found.values():
            text = " ".join([*words(pods), *(variables(pods)[name] for name in variables(pods))])
            for name, value in variables(pods).items():
                text = text.replace(f"$({name})", value)
            assert coordinator in text, pods.name


# -- what is in two places ---------------------------------------------------------------------------------------------


def test_the_coordinator_knows_how_many_shards_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for objects, name in ((base(), "shards"), (KUBEFLOW, "shard")):
        found = {each.name: each for each in templates(objects)}
        assert parsed(found["coordinator"], monkeypatch).shards == found[name].count


def test_every_overlay_has_the_same_wiring_and_names_what_it_wires() -> None:
    texts = {(FILES / "overlays" / name / "wiring.yaml").read_text() for name in OVERLAYS}
    assert len(texts) == 1
    for name in OVERLAYS:
        overlay = yaml.safe_load((FILES / "overlays" / name / "kustomization.yaml").read_text())
        assert overlay["namespace"]
        assert [each["name"] for each in overlay["replicas"]] == ["shards"]
        assert overlay["replacements"] == [{"path": "wiring.yaml"}]


def test_the_files_of_prometheus_operator_say_what_prometheus_reads() -> None:
    assert TARGET.read_text() == rule(), "make alerts"


def test_certificates_are_for_the_names_that_are_advertised_and_the_roles_that_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {each.name: each for each in templates(base())}
    host = parsed(found["coordinator"], monkeypatch).advertise.rpartition(":")[0]
    assert one(CERT_MANAGER, "Certificate", "coordinator")["spec"]["dnsNames"][0] == host
    host = parsed(found["shards"], monkeypatch).advertise.rpartition(":")[0]
    assert one(CERT_MANAGER, "Certificate", "shards")["spec"]["dnsNames"][0] == host.replace("shards-0", "*", 1)
    host = parsed(RELAYS, monkeypatch).advertise.rpartition(":")[0].replace("shards-0", "*", 1)
    assert one(CERT_MANAGER, "Certificate", "relays")["spec"]["dnsNames"][:2] == [host, host.removeprefix("*.")]
    runtime = {each.name: each for each in templates(KUBEFLOW)}
    [wildcard, _] = one(KUBEFLOW, "Certificate", "ps-server")["spec"]["dnsNames"]
    for name in ("coordinator", "shard"):
        host = parsed(runtime[name], monkeypatch).advertise.rpartition(":")[0]
        assert host == f"char-gpt-{name}-0-0.{wildcard.removeprefix('*.')}", "what JobSet calls the first pod of each"
    assert one(KUBEFLOW, "TrainJob", "char-gpt")["metadata"]["name"] == variables(runtime["shard"])["JOBSET"]

    roles = one(base(), "ConfigMap", "roles")["data"]["roles"]
    assert roles == one(KUBEFLOW, "ConfigMap", "ps-roles")["data"]["roles"]
    known = set(re.findall(r"^cn:(\S+) \w+$", roles, re.MULTILINE))
    holders = [each for each in (*CERT_MANAGER, *KUBEFLOW) if each["kind"] == "Certificate"]
    names = {each["spec"]["commonName"] for each in holders if not each["spec"].get("isCA")}
    assert names == known == {"ps-server", "ps-relay", "ps-worker", "ps-reader", "ps-admin"}


def secrets(pods: Template) -> Iterator[str]:
    for volume in pods.spec["volumes"]:
        if "secret" in volume:
            yield volume["secret"]["secretName"]


def test_both_kinds_of_certificates_fill_the_secrets_that_the_pods_look_for() -> None:
    wanted = {name for objects in (base(), relays()) for pods in templates(objects) for name in secrets(pods)}
    wanted |= {"reader-tls", "admin-tls"}
    of_manager = {each["spec"]["secretName"] for each in CERT_MANAGER if each["kind"] == "Certificate"}
    generated = yaml.safe_load((FILES / "components" / "dev-certs" / "kustomization.yaml").read_text())
    assert of_manager - {"ca-tls"} == wanted == {each["name"] for each in generated["secretGenerator"]}
    for each in generated["secretGenerator"]:
        assert [file.partition("=")[0] for file in each["files"]] == ["tls.crt", "tls.key", "ca.crt"]
    of_kubeflow = {name for pods in templates(KUBEFLOW) for name in secrets(pods)}
    made = {each["spec"]["secretName"] for each in KUBEFLOW if each["kind"] == "Certificate"}
    assert of_kubeflow == made - {"ps-ca-tls"}


# -- safety ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pods", [*EVERY, *templates(RAY)], ids=lambda pods: f"{pods.kind}-{pods.name}")
def test_a_pod_keeps_to_the_restricted_pod_security_standard_and_writes_to_volumes_alone(pods: Template) -> None:
    user = int(re.findall(r"^USER (\d+):\d+$", DOCKERFILE, re.MULTILINE)[0])
    assert pods.spec["securityContext"]["runAsNonRoot"] is True
    assert pods.spec["securityContext"]["runAsUser"] == pods.spec["securityContext"]["fsGroup"] == user
    assert pods.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pods.container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pods.spec.keys()
    allowed = {"secret", "configMap", "emptyDir", "persistentVolumeClaim"}
    assert {key for volume in pods.spec["volumes"] for key in volume} <= allowed | {"name"}
    assert pods.spec["automountServiceAccountToken"] is False
    assert pods.spec["enableServiceLinks"] is False, "a Service that is called ps would set PS_PORT"


@of_every
def test_a_pod_mounts_the_volumes_that_it_has_and_may_write_to_tmp(pods: Template) -> None:
    mounts = {each["name"]: each for each in pods.container["volumeMounts"]}
    assert mounts.keys() == {each["name"] for each in pods.spec["volumes"]}
    assert mounts["tmp"]["mountPath"] == "/tmp" == re.findall(r"HOME=(\S+)", DOCKERFILE)[0]
    assert mounts["certs"]["readOnly"] is True
    workers = "runs" in mounts
    assert ("checkpoints" in mounts) == (pods in SERVERS), "only the servers see their checkpoints"
    if workers:
        assert mounts["runs"]["mountPath"] == re.findall(r"^WORKDIR (\S+)", DOCKERFILE, re.MULTILINE)[0] + "/runs"
    for variable, value in variables(pods).items():
        if value.startswith("/"):
            assert any(value.startswith(each["mountPath"]) for each in mounts.values()), variable


def test_every_pod_is_of_the_image_that_the_dockerfile_makes_and_has_limits() -> None:
    assert {pods.container["image"] for pods in EVERY} == {"ps-torch"}
    assert 'ENTRYPOINT ["ps-server"]' in DOCKERFILE
    assert all("memory" in pods.container["resources"]["limits"] for pods in EVERY)
    for name in OVERLAYS:
        overlay = yaml.safe_load((FILES / "overlays" / name / "kustomization.yaml").read_text())
        assert "ps-torch" in [each["name"] for each in overlay["images"]]


def test_only_pods_of_the_cluster_reach_its_servers_and_only_at_their_ports() -> None:
    policies = {each["metadata"]["name"]: each["spec"] for each in base() if each["kind"] == "NetworkPolicy"}
    monitoring = read(FILES / "components" / "monitoring" / "network.yaml")
    policies["metrics"] = monitoring[0]["spec"]
    assert policies["closed"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}, (
        "what no other policy allows"
    )
    rules = {name: spec.get("ingress", []) for name, spec in policies.items()}
    ports = {name: [port["port"] for each in allowed for port in each["ports"]] for name, allowed in rules.items()}
    assert ports == {"closed": [], "calls": [], "servers": ["grpc", "data"], "metrics": ["metrics"]}
    [selector] = policies["servers"]["podSelector"]["matchExpressions"]
    labels = {pods.name: pods.metadata["labels"][selector["key"]] for pods in templates(base())}
    assert set(selector["values"]) == {labels["coordinator"], labels["shards"]}
    kustomization = yaml.safe_load((FILES / "base" / "kustomization.yaml").read_text())
    [rule_of_servers] = policies["servers"]["ingress"]
    [source] = rule_of_servers["from"]
    [given] = kustomization["labels"]
    assert source["podSelector"]["matchLabels"] == given["pairs"]
    assert given["includeTemplates"] is True


def test_a_pod_of_the_cluster_calls_its_servers_and_dns_and_nothing_else() -> None:
    allowed = [each for each in base() if each["kind"] == "NetworkPolicy" and each["spec"].get("egress")]
    [calls] = [each["spec"] for each in allowed]
    given = yaml.safe_load((FILES / "base" / "kustomization.yaml").read_text())["labels"][0]
    assert calls["podSelector"]["matchLabels"] == given["pairs"]
    assert calls["policyTypes"] == ["Egress"]
    to_servers, to_dns = calls["egress"]
    [servers] = to_servers["to"]
    [selector] = servers["podSelector"]["matchExpressions"]
    pods = {each.metadata["labels"][selector["key"]]: each for each in templates(base())}
    assert set(pods) - set(selector["values"]) == {"worker"}
    listening = {
        port["containerPort"]
        for name in selector["values"]
        for port in pods[name].container["ports"]
        if port["name"] in ("grpc", "data")
    }
    assert {port["port"] for port in to_servers["ports"]} == listening
    assert {(port["protocol"], port["port"]) for port in to_dns["ports"]} == {("UDP", 53), ("TCP", 53)}
    assert all("namespaceSelector" in each or each["ipBlock"]["cidr"].endswith("/32") for each in to_dns["to"])


def test_pods_of_the_cluster_read_from_relays_at_their_ports_and_metrics_are_scraped() -> None:
    policies = {each["metadata"]["name"]: each["spec"] for each in relays() if each["kind"] == "NetworkPolicy"}
    [pairs] = [each["pairs"] for each in yaml.safe_load((FILES / "base" / "kustomization.yaml").read_text())["labels"]]
    labels = RELAYS.metadata["labels"]
    assert pairs.items() <= labels.items(), "so the policies of the base and the PodMonitor are for relays, too"
    ports = {port["name"]: port["containerPort"] for port in RELAYS.container["ports"]}
    [entered], [left] = policies["relays"]["ingress"], policies["reads"]["egress"]
    assert policies["relays"]["podSelector"]["matchLabels"].items() <= labels.items()
    assert left["to"][0]["podSelector"] == policies["relays"]["podSelector"]
    assert entered["from"][0]["podSelector"] == policies["reads"]["podSelector"] == {"matchLabels": pairs}
    assert [each["port"] for each in entered["ports"]] == ["grpc", "http"]
    assert [each["port"] for each in left["ports"]] == [ports["grpc"], ports["http"]]


def test_the_policy_that_a_comment_offers_for_an_object_store_opens_it_to_the_servers_alone() -> None:
    text = (FILES / "base" / "network.yaml").read_text()
    offered = re.findall(r"^#   ?(.*)$", text, re.MULTILINE)
    policy = yaml.safe_load("\n".join(offered))["spec"]
    [servers] = [each["spec"] for each in base() if each["metadata"]["name"] == "servers"]
    assert policy["podSelector"] == servers["podSelector"]
    assert policy["policyTypes"] == ["Egress"]
    assert policy["egress"][0]["ports"] == [{"protocol": "TCP", "port": 443}]


def test_services_and_budgets_select_the_pods_that_they_are_for() -> None:
    labels = {pods.name: pods.metadata["labels"] for pods in templates(base())}
    labels[RELAYS.name] = RELAYS.metadata["labels"]
    objects = [*base(), *relays()]
    for kind, name in (
        ("Service", "coordinator"),
        ("Service", "shards"),
        ("Service", "relays"),
        ("PodDisruptionBudget", "shards"),
        ("PodDisruptionBudget", "relays"),
    ):
        selector = one(objects, kind, name)["spec"]["selector"]
        assert selector.get("matchLabels", selector).items() <= labels[name].items()
    for name in ("shards", "relays"):
        assert one(objects, "StatefulSet", name)["spec"]["serviceName"] == name
    for name in ("coordinator", "shards"):
        assert one(base(), "Service", name)["spec"]["publishNotReadyAddresses"] is True


def jobs_of(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The specifications of a JobSet's Jobs by name."""
    return {each["name"]: each["template"]["spec"] for each in spec["replicatedJobs"]}


OF_RUNTIME = one(KUBEFLOW, "ClusterTrainingRuntime", "parameter-server")["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    "spec", [one(base(), "Job", "workers")["spec"], jobs_of(OF_RUNTIME)["node"]], ids=["base", "kubeflow"]
)
def test_a_worker_that_is_preempted_does_not_count_as_failed(spec: dict[str, Any]) -> None:
    assert spec["completionMode"] == "Indexed"
    assert spec["podReplacementPolicy"] == "Failed"
    assert spec["backoffLimitPerIndex"] > 0
    [ignored] = spec["podFailurePolicy"]["rules"]
    assert (ignored["action"], ignored["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "a policy for failed pods needs it"


def test_servers_of_a_jobset_come_back_as_often_as_those_of_the_base() -> None:
    for name in ("coordinator", "shard"):
        job = jobs_of(OF_RUNTIME)[name]
        assert job["backoffLimit"] >= 100
        of_base = {"coordinator": "coordinator", "shard": "shards"}[name]
        [container], [same] = (
            pods["spec"]["containers"]
            for pods in (
                job["template"],
                next(
                    each
                    for each in base()
                    if each["metadata"]["name"] == of_base and each["kind"] in ("Deployment", "StatefulSet")
                )["spec"]["template"],
            )
        )
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe] == same[probe], f"{name}'s {probe}"


def test_the_jobset_without_kubeflow_is_that_of_the_runtime() -> None:
    """So what holds for the pods of the one holds for those of the other."""
    alone, of_runtime = one(JOBSET, "JobSet", "char-gpt")["spec"], copy.deepcopy(OF_RUNTIME)
    [node] = (each for each in of_runtime["replicatedJobs"] if each["name"] == "node")
    del node["template"]["metadata"]  # by which Kubeflow finds where a TrainJob's trainer goes
    arguments = node["template"]["spec"]["template"]["spec"]["containers"][0]["args"]
    arguments[arguments.index("--out=runs/kubeflow")] = "--out=runs/jobset"
    assert alone == of_runtime
    assert one(JOBSET, "JobSet", "char-gpt")["metadata"] == one(KUBEFLOW, "TrainJob", "char-gpt")["metadata"], (
        "the names in the certificates"
    )


def test_the_workers_of_volcano_are_those_of_the_base() -> None:
    """But for the launch's name, which no field of their pods has, and where they write."""
    [ours], [base_workers] = templates(VOLCANO), templates([one(base(), "Job", "workers")])
    [spec] = [each["spec"] for each in VOLCANO]
    assert spec["minAvailable"] == ours.count == base_workers.count
    assert words(ours)[:-1] == words(base_workers)[:-1]
    assert ours.spec["volumes"] == base_workers.spec["volumes"]
    assert variables(ours).keys() == variables(base_workers).keys()


def test_workers_that_are_groups_are_started_alike_by_a_job_a_jobset_and_a_trainjob(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the pods of the first one do is tried in test_pods.py."""
    objects = with_groups([*base(), *JOBSET, *KUBEFLOW])
    assert objects != [*base(), *JOBSET, *KUBEFLOW]
    of_job, job_set, train = (
        one(objects, kind, name)["spec"]
        for kind, name in (("Job", "workers"), ("JobSet", "char-gpt"), ("TrainJob", "char-gpt"))
    )
    of_set = jobs_of(job_set)["node"]
    containers = [each["template"]["spec"]["containers"][0] for each in (of_job, of_set)]
    told = {"NAMESPACE": "ps", "JOB_COMPLETION_INDEX": "1"}
    for name, value in {"PS_SERVER": "h:1", "PS_LAUNCH_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    trainer = train["trainer"]
    for container, pods in zip((*containers, trainer), (of_job, of_set, train["trainer"]), strict=True):
        assert container["command"] == ["ps-worker"]
        words = [re.sub(r"\$\((\w+)\)", lambda found: told[found[1]], word) for word in container["args"]]
        read_as = ps_worker.cli.parser().read(words)
        assert (read_as.workers, read_as.group, read_as.first_rank, read_as.mode) == (1, 2, 1, "sync")
        assert read_as.max_restarts > 0, "a group is started again as a whole"
        assert read_as.world_size == pods.get("completions", pods.get("numNodes")), "a pod is a group"
        resources = container.get("resources", container.get("resourcesPerNode"))
        assert resources["requests"]["cpu"] == str(read_as.group)
    variables_of_job = {each["name"]: each.get("value") for each in containers[0]["env"]}
    assert variables_of_job["OMP_NUM_THREADS"] == "1"
    assert of_set["completionMode"] == of_job["completionMode"] == "Indexed", "their pods have an index"
    for name, wanted in (("jobset", "../../jobset"), ("trainjob", "../../kubeflow")):
        folder = yaml.safe_load((FILES / "groups" / name / "kustomization.yaml").read_text())
        assert (folder["resources"], folder["components"]) == ([wanted], ["../../components/groups"])


def test_the_ray_jobs_script_knows_its_arguments_and_writes_where_all_nodes_see_it() -> None:
    [job] = [each for each in RAY if each["kind"] == "RayJob"]
    python, script, *arguments = job["spec"]["entrypoint"].split()
    assert python == "python"
    source = (ROOT / script).read_text()
    named = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert all(f'add_argument("{flag}"' in source for flag in named)
    head, workers = templates(RAY)
    assert int(named["--workers"]) <= workers.count
    [claim] = [each["metadata"]["name"] for each in RAY if each["kind"] == "PersistentVolumeClaim"]
    for pods in (head, workers):
        [mount] = [each for each in pods.container["volumeMounts"] if named["--out"].startswith(each["mountPath"])]
        [volume] = [each for each in pods.spec["volumes"] if each["name"] == mount["name"]]
        assert volume["persistentVolumeClaim"]["claimName"] == claim


# -- the page ----------------------------------------------------------------------------------------------------------


def test_the_page_says_what_the_files_say() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    component = (FILES / "components" / "dev-certs" / "kustomization.yaml").read_text()
    [words] = re.findall(r"# +(ps-server dev-certs (?:.*\\\n)*.*)", component)
    command = re.sub(r"\\\n# +", "", words)
    assert f"$ {command}\n" in re.sub(r"\\\n +", "", page)
    hosts = {word.strip("'") for word in command.split() if "svc" in word}
    advertised = [one(CERT_MANAGER, "Certificate", name) for name in ("coordinator", "shards", "relays")]
    assert hosts == {name for each in advertised for name in each["spec"]["dnsNames"] if "svc" in name}
    [size] = re.findall(r"kubectl -n ps patch job workers --type=merge -p '(.*)'", page)
    resized = json.loads(size)["spec"]
    assert resized.keys() == {"completions", "parallelism"}
    assert len(set(resized.values())) == 1, "an Indexed Job changes its size only where both are one number"
    of_base = one(base(), "Job", "workers")["spec"]
    assert of_base["completions"] == of_base["parallelism"]
    applied = re.findall(r"kubectl (?:apply|delete) -k (\S+)", page)
    assert len(applied) >= 3
    copied = {copy: original for original, copy in re.findall(r"\$ cp -r (\S+) (\S+)", page)}
    assert all((ROOT / copied.get(path, path) / "kustomization.yaml").exists() for path in applied)
    [example] = re.findall(r"```yaml\n(resources: .*?)```", page, re.DOTALL)
    overlay = yaml.safe_load((FILES / "overlays" / "gpu" / "kustomization.yaml").read_text())
    assert yaml.safe_load(example).items() <= {**overlay, "images": overlay["images"][:1]}.items()
    for words in re.findall(r"^\$ .*?(ps-server (?:status|checkpoint) .*)", page, re.MULTILINE):
        ps_server.cli.parser().read(words.split()[1:])
    requests = [(pods.count, pods.container["resources"]["requests"]["memory"]) for pods in templates(base())]
    gibibytes = sum(count * int(text.removesuffix("Gi")) for count, text in requests)
    assert f"room for {gibibytes} GiB of memory" in page
