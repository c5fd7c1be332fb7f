"""Log lines: text or JSON, with what the process is as fields, and not where a script has logging of its own."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from ps_runtime.logs import JSON_LINE, JsonLines, Speaker, formatter
from tests.tools.cases import cases
from tests.tools.cluster import Cluster, until
from tests.tools.launching import Start, environment, python, run, script


def record(message: str, *arguments: object, trace: bool = False) -> logging.LogRecord:
    made = logging.LogRecord("ps_server", logging.WARNING, "", 0, message, arguments, sys.exc_info() if trace else None)
    made.created = 1_700_000_000.25
    return made


def fields(speaker: Speaker, message: str, *arguments: object) -> dict[str, Any]:
    """What a line in JSON says beside its time and level."""
    line = json.loads(JsonLines(speaker).format(record(message, *arguments)))
    del line["time"], line["level"]
    return dict(line)


def test_a_line_in_json_has_the_time_the_level_and_what_the_process_is() -> None:
    line = JsonLines(Speaker("shard", index=1)).format(record("100 %% of %s", "it"))
    assert line.encode().startswith(JSON_LINE)
    found = json.loads(line)
    when = datetime.fromisoformat(found.pop("time"))
    assert when == datetime(2023, 11, 14, 22, 13, 20, 250_000, timezone.utc)
    assert found == {"level": "warning", "role": "shard", "index": 1, "message": "100 % of it"}


def test_what_a_message_names_is_a_field() -> None:
    coordinator = Speaker("coordinator")
    said = fields(coordinator, "job %s: worker %d is not removed from shard %d yet: %s", "mine", 3, 1, OSError("no"))
    assert said == {
        "role": "coordinator",
        "job": "mine",
        "rank": 3,
        "shard": 1,
        "message": "job mine: worker 3 is not removed from shard 1 yet: no",
    }
    assert fields(coordinator, "50 %% of %d, job %s", 7, "mine")["job"] == "mine"
    assert fields(coordinator, "workers %s did not come", [1, 2]).keys() == {"role", "message"}
    assert fields(coordinator, "job %s") == {"role": "coordinator", "message": "job %s"}, "nothing to put in"


def test_a_workers_own_place_is_not_that_of_the_worker_that_it_speaks_of() -> None:
    said = fields(Speaker("worker", job="mine", rank=0), "worker %d is gone", 5)
    assert (said["job"], said["rank"]) == ("mine", 0)


def test_one_record_is_one_line_whatever_is_in_it() -> None:
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        line = JsonLines(Speaker("shard", index=0)).format(record("from %s", "a\nhost\x1b[2J", trace=True))
    assert line.isprintable()
    found = json.loads(line)
    assert found["message"] == "from a\nhost\x1b[2J"
    assert found["exception"].endswith("ValueError: first\nsecond")


def test_as_text_a_servers_line_has_no_name_and_a_workers_its_rank() -> None:
    def said(speaker: Speaker) -> str:
        return formatter(speaker, "text").format(record("hello"))[24:]

    assert said(Speaker("coordinator")) == "WARNING hello"
    assert said(Speaker("worker", rank=3)) == "WARNING worker 3: hello"
    assert said(Speaker("worker")) == "WARNING worker ?: hello"


# -- servers ---------------------------------------------------------------------------------------------------------


def json_lines(text: str) -> list[dict[str, Any]]:
    """All lines of a stderr, each of which must be JSON."""
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.long
def test_all_that_servers_write_to_stderr_is_json(start: Start) -> None:
    flags = ("--shards", "2", "--port", "0", "--metrics-port", "0", "--log-format", "json", "--log-level", "info")
    command = start("-m", "ps_server", "up", *flags, "--native", "off", PS_SHARDZ="1")
    command.says(r"ps-server: ready at (\S+) \(2 shards\)\n")
    next(child for child in command.family() if "--index 1" in " ".join(child.cmdline())).kill()
    command.says(r"metrics at", count=2)
    until(lambda: "is back" in command.err, "the shard's return")
    assert command.end(15) == 0
    lines = json_lines(command.err)
    by = {(line["role"], line.get("index")): line["message"] for line in reversed(lines)}
    assert "PS_SHARDZ" in by["ps-server", None]
    assert by["shard", 0].startswith("threads: ")  # how many there may be, before all else
    registered = {line["shard"] for line in lines if line["role"] == "shard" and line["message"].startswith("shard ")}
    assert registered == {0, 1}
    assert any("is back (restart 1)" in line["message"] for line in lines if line["role"] == "ps-server")


def test_the_error_that_ends_a_server_is_json_too() -> None:
    done = python("-m", "ps_server", "up", "--restore", "--log-format", "json")
    assert done.returncode == 1
    [line] = json_lines(done.stderr)
    assert "need --checkpoint-dir" in line["message"]


@pytest.mark.long
def test_at_the_level_of_warnings_servers_that_start_well_log_nothing(start: Start) -> None:
    """At that of infos they name each shard, as the test above finds."""
    command = start(
        *("-m", "ps_server", "up", "--shards", "1", "--port", "0", "--metrics-port", "0", "--log-level", "warning")
    )
    command.says(r"ready at (\S+) \(1 shard\)\n")
    assert command.err == ""


# -- workers ---------------------------------------------------------------------------------------------------------

LOGS = """
import logging
exec(sys.argv[1])
import ps_worker
session = ps_worker.connect()
for level in ("debug", "info", "warning"):
    getattr(logging.getLogger("ps_worker"), level)("it is %s", level)
sys.stdout.write("a line of the script\\n")
session.close()
exec(sys.argv[2])
"""


def launched(tmp_path: Path, *flags: str, before: str = "", after: str = "", workers: int = 2) -> Any:
    words = ("--mode", "ddp" if workers > 1 else "single", "--workers", str(workers), *flags)
    return run(*words, script(tmp_path, LOGS), before, after)


@pytest.mark.long
def test_a_workers_lines_in_json_have_its_job_and_rank_and_no_prefix(tmp_path: Path) -> None:
    done = launched(tmp_path, "--log-format", "json", "--log-level", "info", "--job", "mine")
    lines = json_lines(done.stderr)
    found = {(line["job"], line["rank"], line["level"], line["message"]) for line in lines}
    assert found >= {("mine", rank, level, f"it is {level}") for rank in (0, 1) for level in ("info", "warning")}
    assert not any(line["level"] == "debug" for line in lines)
    assert sorted(done.stdout.splitlines()) == ["[0] a line of the script", "[1] a line of the script"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "heard"),
    cases(
        [((), ["it is warning"]), (("--log-level", "debug"), ["it is debug", "it is info", "it is warning"])],
        [(("--log-level", "error"), [])],
    ),
)
def test_a_worker_logs_warnings_unless_it_is_told_otherwise(
    tmp_path: Path, flags: tuple[str, ...], heard: list[str]
) -> None:
    done = launched(tmp_path, *flags, workers=1)
    assert [line.partition("worker 0: ")[2] for line in done.stderr.splitlines() if "it is" in line] == heard


@pytest.mark.long
@pytest.mark.parametrize("name", cases([""], ["ps_worker"]))
def test_a_script_with_a_handler_of_its_own_gets_no_second_line(tmp_path: Path, name: str) -> None:
    """On the root logger, as basicConfig makes it, or on the package's own."""
    before = f"""
handler = logging.StreamHandler()
handler.setFormatter(logging.Formatter("mine: %(message)s"))
logging.getLogger({name!r}).addHandler(handler)
"""
    done = launched(tmp_path, "--log-format", "json", before=before, workers=1)
    assert done.stderr.splitlines() == ["mine: it is warning"]


@pytest.mark.long
def test_the_error_that_ends_a_worker_is_a_line_in_json(tmp_path: Path) -> None:
    done = launched(tmp_path, "--log-format", "json", after="ps_worker.connect('h:1', 'sync', None, 3, 2)", workers=1)
    error = json_lines(done.stderr)[-2]
    assert (error["level"], error["role"], error["rank"]) == ("critical", "worker", 0)
    assert "rank must be from 0 to world_size - 1 = 1, got 3" in error["message"]
    assert 'File "<string>", line 1' in error["exception"]
    assert json_lines(done.stderr)[-1]["message"] == "worker 0 failed with code 1"


@pytest.mark.long
def test_without_the_launcher_variables_say_the_same(shared: Cluster, job: str) -> None:
    code = "import ps_worker, logging; ps_worker.connect(); logging.getLogger('ps_worker').info('hello')"
    own = environment(PS_LOG_LEVEL="info", PS_LOG_FORMAT="json", PS_SERVER=shared.address, PS_JOB=job)
    done = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True, check=True)
    [line] = json_lines(done.stderr)
    assert (line["job"], line["rank"], line["message"]) == (job, 0, "hello")
