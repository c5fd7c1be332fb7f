"""The benchmarks' commands, in forms so small that their figures mean nothing: that they run, check and draw."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from argparse import Namespace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bench import feed, feed_peer
from bench.__main__ import NAMES, command_line, modules, parser
from bench.feed_beside import why_no_ray
from bench.flood import ATTACKS, allowed_ms
from bench.group_member import Order
from bench.groups import lost_line
from bench.link import why_no_link
from bench.machine import cpu_seconds, family, waits
from bench.peer_part import Part, owned
from bench.peer_work import Batches, Rounds, Work, check_weights, save_expected
from bench.peers import reason
from bench.report import write_page
from bench.results import Result, check_loss, result
from bench.runs import merged
from bench.scale import predicted
from bench.training import build
from ps_runtime.pools import DaemonPool
from tests.chaos.cluster import free_ports
from tests.tools.cluster import until
from tests.tools.launching import python
from tests.tools.network import network_of

ROOT = Path(__file__).parents[2]
SMALLEST = {
    "round": "--mib 1 --rounds 1 --transport shm,tcp --wire float32 --no-peers --tls",
    "scale": "--mib 1 --workers 1 --shards 1 --rounds 1 --transport shm",
    "peers": "--mib 1 --shards 1 --turns 1 --rounds 2 --layers 1 --width 64 --batch 1 --steps 2 --transport tcp"
    " --only gloo,DataParallel",
    "train": "--vectors 3 --vector-kib 1 --turns 1 --steps 2 --only tcp --only async",
    "straggler": "--workers 2 --shards 1 --base-ms 5 --seconds 1 --turns 1",
    "memory": "--layers 1 --width 64 --batch 1 --workers 2 --shards 1 --steps 2 --transport grpc --bucket-kib 64",
    "idle": "--seconds 0.5 --shards 1 --transport tcp",
    "rows": "--rows 1000 --dim 4 --ids 100 --steps 5 --grow 20000 --only sgd, --beyond 80000 --checkpoints 1",
    "lowcomm": "--samples 4 --layers 1 --width 64 --batch 1 --workers 2 --shards 1 --seeds 1 --systems sync+all-1+0.1",
    "crowd": "--workers 2 --shards 1 --rounds 1 --transport tcp --joins 4 --join-shards 2",
    "flood": "--seconds 0.5 --transport tcp --principals 1 --attacks push:half,heartbeat:cancelled",
    "restore": "--mib 1 --bucket-kib 64 --rounds 1",
    "recovery": "--mib 1 --seconds 1 --every 0.5 --rounds 1",
    "launches": "--count 3 --transport tcp",
    "feed": "--mb 1 --turns 1 --editions 2 --copies 1 --pairs 1 --turn-seconds 0.5 --layers 1 --width 64 --batch 1"
    " --changes-layers 1 --changes-width 64 --trained 5 --changes-warm-up 2 --updates 1 --readers 4 --relays 2"
    " --relayed-mb 0.1 --seconds 1 --pause-ms 50 --shards 1 --nice 0",
    "groups": "--layers 1 --width 64 --batch 1 --shards 1 --turns 1 --steps 2 --transport tcp --link-steps 2 --lease 2"
    " --modes sync --equal-steps 3",
}
MARKS = dict.fromkeys(("rows", "lowcomm", "crowd", "restore"), pytest.mark.long)  # which is made of rounds
MARKS |= dict.fromkeys(("scale", "launches", "feed"), pytest.mark.repeat)  # tests below run them in other ways


def run(name: str, flags: str, directory: Path, *more: str) -> list[dict[str, Any]]:
    """The results of a benchmark; a picture of them is in the directory."""
    results = ["--json", str(directory / "found.jsonl"), "--picture", str(directory / "found.png")]
    done = python("-m", "bench", name, *flags.split(), *more, *results, folder=directory, seconds=600)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (directory / "found.jsonl").read_text().splitlines()]


@pytest.mark.timeout(600)  # several commands, each of which imports torch, beside other tests
@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, pytest.mark.slow)) for name in SMALLEST])
def test_a_benchmark_runs_and_says_what_it_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # what is compiled stays here
    found = run(name, SMALLEST[name], tmp_path)
    assert found
    for line in found:
        assert line["bench"] == name
        assert line["not_measured"] if line["ms"] is None else line["ms"] > 0
        assert {"system", "transport", "wire", "workers", "shards", "bytes", "ratios", "threads", "versions"} <= set(
            line
        )
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    if name in SHAPES:
        SHAPES[name](found)


def check_feed(found: list[Result]) -> None:
    """Each part of `bench feed` has its systems, each beside its peer."""
    systems = {(line["scenario"], line["system"]): line for line in found}
    scenarios = dict.fromkeys(scenario for scenario, _ in systems)
    host, near, training, changed, link, unchanged, requests, memory = scenarios
    check_one_host({system: line for (scenario, system), line in systems.items() if scenario == host})
    for way in ("ours", "ours, in messages"):
        assert systems[requests, way]["editions"] > 1
        assert systems[requests, way]["torn"] == 0
    assert set(systems[near, "ours"]["ratios"]) == {"ours", "two copies"}
    assert systems[near, "messages of the same relay"]["ratios"]["ours"] > 0
    for readers in ("1 reader", "1 reader, in messages", "4 readers, 2 relays"):
        assert set(systems[training, readers]["ratios"]) == {"without"}
    assert systems[training, "4 readers, 2 relays"]["least_editions"] >= 1
    parts = [line["ratios"]["bfloat16 bytes"] for line in found if line["scenario"] == changed]
    assert 0 < parts[0] < parts[1] < parts[2] < 1
    copied = systems[link, "safetensors, copied"]
    assert copied["not_measured"] if why_no_link() else copied["ratios"]["ours"] > 0
    assert systems[unchanged, "ours"]["answers_per_core"] > 0
    assert set(systems[memory, "changes"]["ratios"]) == {"two copies"}


def check_one_host(systems: dict[str, Result]) -> None:
    """Editions on one host are measured in both ways, beside each peer."""
    for peer in ("plain sockets", "safetensors in a folder", "broadcast over gloo"):
        assert systems[peer]["ratios"]["ours"] > 0
    for way in ("ours", "ours, in messages"):
        assert systems[way]["editions"] == 2
        assert set(systems[way]["ratios"]) == {"ours", "ours, in messages", "sockets", "two copies"}
    assert systems["ours"]["received_part"] == 0
    assert systems["ours, in messages"]["received_part"] > 0
    assert systems["Ray's object store"]["not_measured" if not has_ray() else "ms"]


def has_ray() -> bool:
    """Whether the benchmark of feeds finds Ray."""
    return not why_no_ray()


def check_groups(found: list[Result]) -> None:
    """Each part of `bench groups` has ours beside HSDP, and the same weights."""
    systems = {(line["scenario"], line["system"]): line for line in found}
    assert systems["one host", "sync"]["ratios"]["HSDP"] > 0
    for system in ("local:8", "groups apart"):
        link = systems["a link of 100 Mbit/s", system]
        assert link["not_measured"] if why_no_link() else min(link["ratios"]["HSDP"], link["ratios"]["no link"]) > 0
    stopped, killed = (systems[f"a member is {how}", "sync, quorum 1"] for how in ("stopped", "killed"))
    assert {*stopped["ratios"], *killed["ratios"]} == {"lease"}
    assert min(stopped["back_ms"], killed["back_ms"]) > 0
    optimizers = ("AdamW", "SGD with momentum")
    cut = [f"{each}, {cut}" for each in optimizers for cut in ("tensor parallel", "pipeline")]
    for name, other in [*((each, "HSDP") for each in optimizers), *((each, "replicas") for each in cut)]:
        ours, peer = (systems[f"3 steps of {name}", system] for system in ("sync", other))
        assert ours["hsdp_difference"] <= 1e-6
        assert ours["difference"] <= max(1e-6, 1.1 * peer["difference"]) < 1e-3


def check_train(found: list[Result]) -> None:
    """The systems that were asked for, beside the peers, train parameters of the size that was asked for."""
    assert {line["bytes"] for line in found} == {3 * 1024}
    assert [line["system"] for line in found] == ["ddp", "sync", "async", "independent", "single"]


def check_idle(found: list[Result]) -> None:
    """Of ours both ends are counted."""
    ddp, ours = found
    assert (ddp["system"], ddp["shards_wakeups"], ours["system"], ours["transport"]) == ("ddp", 0, "ours", "tcp")
    assert min(ours[name] for name in ("wakeups", "workers_wakeups", "shards_wakeups", "idle_cpu_ms")) > 0


def check_rows(found: list[Result]) -> None:
    """What a step takes of the processors is there for ours and for DDP, in each way in which ours use the library."""
    systems = {(line["system"], line["transport"]): line for line in found}
    assert systems["DDP", ""]["cpu_ms"] > 0
    for transport in ("auto", "tcp"):
        for known in ("", ", next ids known"):
            line = systems[f"ours async sgd{known}, with the library", transport]
            assert line["ratios"]["CPU of DDP"] == pytest.approx(line["cpu_ms"] / systems["DDP", ""]["cpu_ms"], rel=0.1)
    assert systems["torch RPC", ""]["cpu_ms"] is None


SHAPES = {"feed": check_feed, "groups": check_groups, "train": check_train, "idle": check_idle, "rows": check_rows}


@pytest.mark.long
def test_one_part_of_a_benchmark_is_measured_alone(tmp_path: Path) -> None:
    found = run("feed", SMALLEST["feed"], tmp_path, "--parts", "host")
    assert len({line["scenario"] for line in found}) == 1
    check_one_host({line["system"]: line for line in found})


# -- what the kernel says of processes -------------------------------------------------------------------------------

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
for line in sys.stdin:
    sum(range(int(line)))
    print(flush=True)
child.communicate()
"""


def test_the_cpu_and_the_waits_of_processes_and_their_children_are_counted() -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", PARENT], text=True, **pipes) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        pids = family(parent.pid)
        assert pids == [parent.pid, child]
        used = [cpu_seconds(pids)]
        for count in (1, 10_000_000):
            before = waits(pids)
            assert {(pid, pid) for pid in pids} <= {*before}
            parent.stdin.write(f"{count}\n")
            parent.stdin.flush()
            parent.stdout.readline()
            until(
                lambda was=before: waits([parent.pid])[parent.pid, parent.pid] > was[parent.pid, parent.pid], "a wait"
            )
            used.append(cpu_seconds(pids))
        assert used[1] - used[0] < used[2] - used[1]
        parent.stdin.close()


# -- that a wrong result is found, and what cannot be measured is said -----------------------------------------------


@pytest.mark.long
def test_processes_that_abort_or_do_not_end_are_found(tmp_path: Path) -> None:
    flags = "launches --count 3 --at-once 3 --ends abort,late,hang --bound 15 --transport tcp --mib 1 --steps 1"
    done = python("-m", "bench", *flags.split(), folder=tmp_path, seconds=600)
    assert done.returncode == 1
    assert "promises were broken" in done.stderr
    found = json.loads(done.stdout)
    assert found["codes"] == {"SIGABRT": 4, "none": 2}
    assert found["violations"] == 6
    ends = [each["ends_by"] for each in found["violation_details"]]
    assert sorted(ends) == ["abort", "abort", "hang", "hang", "late", "late"]
    for each in found["violation_details"]:
        assert 'launch_worker.py", line' in each["output"], "where it was"
        assert ("threads" in each) == (each["code"] == "none")


def trained(work: Work, ranks: range, steps: int) -> nn.Module:
    """A model that one process has trained with the batches of some workers."""
    model = work.model()
    batches, optimizer = Batches(work, build(work.task)[2], ranks, work.place(0)), work.optimizer(model.parameters())
    for _ in range(steps):
        x, y = batches.next()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_peers_whose_weights_are_those_of_other_batches_are_refused(tmp_path: Path) -> None:
    work, path = Work("step", 2, layers=1, width=64, batch=1), tmp_path / "expected.safetensors"
    save_expected(trained(work, range(2), 3), path)
    check_weights(work, trained(work, range(2), 3), path)
    for wrong in (trained(work, range(1), 3), trained(work, range(2), 2), work.model()):
        with pytest.raises(SystemExit, match=r"wrong result: weights are .* of their way off"):
            check_weights(work, wrong, path)


@pytest.mark.parametrize("servers", [1, 2])
def test_the_servers_of_the_peers_step_with_the_mean_and_a_sum_is_refused(servers: int) -> None:
    work = Work("round", 2, mib=1)
    models = [work.model() for _ in range(2)]
    rounds = [Rounds(work, rank, model) for rank, model in enumerate(models)]
    parts = [Part(work, number, servers) for number in range(servers)]
    for _ in range(2):
        for each in rounds:
            each.fill()
        last: list[list[bool]] = []
        for model in models:
            gradients = [[each.grad for each in part] for part in owned(model, servers)]
            last.append([part.add(own) for part, own in zip(parts, gradients, strict=True)])
        assert last == [[False] * servers, [True] * servers]
    with torch.no_grad():
        for model in models:
            for mine, part in zip(owned(model, servers), parts, strict=True):
                for parameter, weights in zip(mine, part.parameters, strict=True):
                    parameter.copy_(weights)
    for each in rounds:
        each.check()
    with torch.no_grad():
        for parameter in models[0].parameters():
            parameter.mul_(2)
    with pytest.raises(SystemExit, match="wrong result: 32768 of 32768 weights"):
        rounds[0].check()


@pytest.mark.parametrize("loss", [2.1, 1.9, float("nan"), float("inf")])
def test_a_system_that_trains_something_else_is_refused(loss: float) -> None:
    check_loss("ours", 2.01, 2.0)
    with pytest.raises(SystemExit, match=r"wrong result: the loss of ours is \S+, expected 2.0000"):
        check_loss("ours", loss, 2.0)


def test_what_dataparallel_brings_together_in_its_backward_pass_is_the_gradient_of_a_round() -> None:
    work = Work("round", 1, mib=1)
    model = work.model()
    rounds, optimizer = Rounds(work, 0, model), work.optimizer(model.parameters())
    for _ in range(2):
        rounds.fill()
        optimizer.zero_grad()
        nn.DataParallel(model, device_ids=None)(torch.zeros(1)).mean().backward()
        optimizer.step()
    rounds.check()


def test_a_peer_that_is_not_there_says_how_it_could_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", nothing)
    assert "pip install --group peers" in reason("Ray", Work("round", 2))
    assert "docs/comparison.md" in reason("Horovod", Work("round", 2))
    assert "--device cuda" in reason("DataParallel", Work("round", 2))
    assert "2 GPUs" in reason("DataParallel", Work("round", 1, device="cuda"))
    for name in ("ours", "gloo"):
        assert reason(name, Work("round", 2)) == ""


def test_a_part_of_the_feeds_benchmark_that_does_not_exist_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"expected --parts of host, mapped, .*, got 'speed'"):
        feed.run(Namespace(parts="host,speed"))


def test_a_result_names_no_place_on_the_machine_that_made_it() -> None:
    words = "rows --cold-rows-dir /mnt/disk --rows 7 --folder-of-files=/mnt/files --exec ssh --json found.jsonl"
    assert command_line(words.split()) == "python -m bench rows --rows 7 --exec ..."


def test_the_page_says_what_was_not_measured_and_shows_what_was_predicted(tmp_path: Path) -> None:
    folder = tmp_path / "found"
    folder.mkdir()
    common = {"workers": 2, "shards": 1, "size": 10**6}
    found = [
        result("peers", "Ray", ms=None, not_measured="Ray is not installed", **common),
        result("round", "ours", ms=12345.6, **common),
        result("scale", "ours", ms=1.0, predicted_bytes=predicted(2, 10**6), sent_bytes=1_100_000, **common),
    ]
    for line in found:
        (folder / f"{line['bench']}.jsonl").write_text(json.dumps({**line, "command": "python -m bench"}) + "\n")
    write_page(folder, modules())
    page = (tmp_path / "found.md").read_text()
    assert "| Ray is not installed |" in page
    assert "| 12346 |" in page, "and not 1.235e+04"
    assert "| 1.1 | DataParallel 2.0, ring 1.0, ours 2.0 |" in page
    for name in NAMES:
        assert page.count(f"## {name}\n") == 1


def test_no_flood_delays_a_worker_more_than_the_docs_promise() -> None:
    """Of what was measured last: see docs/benchmarks.md. The numbers of principals are those of the promise."""
    lines = [json.loads(line) for line in (ROOT / "docs/benchmarks/flood.jsonl").read_text().splitlines()]
    assert {line["principals"] for line in lines} == {1, 2, 8}
    assert {line["transport"] for line in lines} == {"shm", "tcp", "grpc"}
    assert {line["system"] for line in lines} > {f"{name}:{end}" for name in ATTACKS for end in ("half", "cancelled")}
    assert [line for line in lines if line["ms"] > allowed_ms(line["alone_ms"])] == []
    assert allowed_ms(10.0) == 40.0


def test_a_group_that_waits_longer_for_a_lost_one_than_is_allowed_breaks_a_promise() -> None:
    """None did when it was measured last."""
    arguments = parser(short=False).parse_args(["groups", "--lease=4"])
    order = Order("ours", server="-", job="lost")
    lines = [lost_line(arguments, order, "killed", gap, None, 0.01) for gap in (5.9, 6.1)]
    published = [json.loads(line) for line in (ROOT / "docs/benchmarks/groups.jsonl").read_text().splitlines()]
    found = [line for line in published if "allowed_ms" in line]
    assert {line["scenario"] for line in found} == {"a member is stopped", "a member is killed"}
    assert [line for line in found if line["ms"] > line["allowed_ms"]] == []
    assert [(line["ms"], line["allowed_ms"], line.get("violations")) for line in lines] == [
        (5900.0, 6000.0, None),
        (6100.0, 6000.0, 1),
    ]


# -- several runs --------------------------------------------------------------------------------------------------


def of_runs(*ms: float) -> list[Result]:
    """The results of runs of two systems: of a peer that takes 10 ms, and ours."""
    same = {"workers": 1, "shards": 1, "size": 4}
    return [
        {**line, "run": run, "command": "python -m bench round"}
        for run, each in enumerate(ms, 1)
        for line in (
            result("round", "gloo", ms=10.0, ratios={"gloo": 1.0}, **same),
            result("round", "ours", ms=each, ratios={"gloo": each / 10}, exact=True, **same),
        )
    ]


def test_of_several_runs_the_page_has_medians_and_the_smallest_and_largest_ratio(tmp_path: Path) -> None:
    lines = of_runs(9.0, 2.0, 3.0)
    assert [line["ms"] for line in merged(lines)] == [10.0, 3.0]
    assert merged(lines)[1]["exact"] is True
    folder = tmp_path / "found"
    folder.mkdir()
    (folder / "round.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_page(folder, modules())
    page = (tmp_path / "found.md").read_text()
    assert "| ours | 1 | 1 | 3 | **0.30** (0.20 to 0.90) |" in page
    assert "Runs: 3." in page


def test_one_run_is_as_it_is_and_runs_of_different_systems_are_refused() -> None:
    assert merged(of_runs(4.0)) == of_runs(4.0)
    with pytest.raises(ValueError, match="expected results of gloo of each run in the same place, got ours"):
        merged([*of_runs(4.0), *({**line, "run": 2} for line in reversed(of_runs(4.0)))])
    with pytest.raises(ValueError, match=r"expected as many results of each run, got \[1, 2\]"):
        merged(of_runs(4.0, 5.0)[:3])


# -- bytes -----------------------------------------------------------------------------------------------------------


def test_predictions_are_those_of_the_formulas() -> None:
    assert predicted(4, 100) == {"DataParallel": 600, "ring": 150, "ours": 200}
    assert predicted(1, 100) == {"DataParallel": 0, "ring": 0, "ours": 200}


@pytest.mark.long
@pytest.mark.netns
def test_the_bytes_of_a_round_at_the_interfaces_are_those_that_were_predicted(tmp_path: Path) -> None:
    with network_of(5) as network:  # hosts count from 1 here
        addresses = ",".join(network.address(number) for number in range(1, 5))
        flags = f"--mib 2 --workers 3 --shards 1 --rounds 4 --transport tcp --addresses {addresses} --interface eth0"
        prefix = f"ip netns exec {network.name(0).removesuffix('0')}{{number}}"
        found = run("scale", flags, tmp_path, "--exec", prefix)
    assert [line["system"] for line in found] == ["ddp", "ours"]
    ring, ours = found
    for way in ("sent_bytes", "received_bytes"):
        assert 1.0 < ring[way] / ring["predicted_bytes"]["ring"] < 1.2
        assert 0.5 < ours[way] / ours["predicted_bytes"]["ours"] < 0.6
    assert 1.0 < ours["ratios"]["predicted"] < 1.2


def test_a_peer_does_not_take_a_connection_to_itself_for_its_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port to which nobody listens yet may be the one that the connection itself is given."""
    address, real = ("127.0.0.1", free_ports(1)), socket.create_connection
    own = real(address, source_address=address)  # what happens by chance where the port is one of those given out
    assert own.getsockname() == own.getpeername()
    monkeypatch.setattr(socket, "create_connection", lambda to: own if own.fileno() >= 0 else real(to))
    dialled = DaemonPool(1, "dialled").submit(lambda: feed_peer._dialled(address))
    until(lambda: own.fileno() < 0 or dialled.done(), "an end of the connection to itself")
    assert not dialled.done()
    with socket.create_server(address) as listener, listener.accept()[0] as accepted, dialled.result(30) as made:
        assert made.getpeername() == accepted.getsockname()
        accepted.close()
        with pytest.raises(EOFError, match="7 bytes too early"):
            feed_peer.receive(made, memoryview(bytearray(7)))
