"""Every setting is read by one parser, wherever it is given; and a process finds its place in what launchers say."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import ps_server.cli
import ps_worker
import ps_worker.cli
from ps_launch.worker_launch import Launch, worker_environment
from ps_protocol.errors import InvalidRequest
from ps_protocol.modes import Consistency
from ps_runtime.command_line import CommandLine
from ps_runtime.known_variables import KNOWN_VARIABLES
from ps_runtime.launch_id import LAUNCH_ID, LAUNCH_RANKS, LAUNCHED, STARTED_FILE
from ps_runtime.settings import as_variables, unknown_variables
from ps_server.config import SETTINGS as SERVER_SETTINGS
from ps_server.config import ServerConfig, config_of
from ps_server.core.limits import Limits
from ps_server.failpoints import VARIABLE as FAILPOINTS
from ps_worker.config import OWN_SETTINGS, SETTINGS, WorkerConfig, resolve

# What each setting takes and refuses: (text, what WorkerConfig has then), and texts that are refused.
REFUSED_NUMBERS = ("many", "-1", "1.5", "1e3", "٣")
REFUSED_SECONDS = ("nan", "-1", "0", "inf", "soon")
TABLE: dict[str, tuple[list[tuple[str, object]], tuple[str, ...]]] = {
    "server": ([("h:1", "h:1"), ("[::1]:50051", "[::1]:50051")], ("nowhere", "http://h:1", "h:0", "h:65536", ":1")),
    "mode": ([("sync", "sync"), ("ssp:4", "ssp:4"), ("ddp", "ddp")], ("bsp", "ssp", "SYNC")),
    "quorum": ([], ("0", "all", "most", "all-0")),  # a part of the rule, see below
    "quorum_grace": ([], REFUSED_SECONDS),
    "job": ([("mine", "mine")], ()),
    "world_size": ([("3", 3)], (*REFUSED_NUMBERS, "0")),
    "elastic": (
        [(text, True) for text in ("1", "true", "Yes", "on")] + [(text, False) for text in ("0", "FALSE", "no", "off")],
        ("maybe", "2"),
    ),
    "connect_timeout": ([("2.5", 2.5), ("60", 60.0)], REFUSED_SECONDS),
    "start_timeout": ([("2.5", 2.5), ("7200", 7200.0)], REFUSED_SECONDS),
    "group_timeout": ([("2.5", 2.5), ("0", 0.0), ("0.0", 0.0)], ("nan", "-1", "inf", "soon")),
    "step_timeout": ([("2.5", 2.5), ("0", 0.0)], ("nan", "-1", "inf", "soon")),
    "busy_seconds": ([("2.5", 2.5), ("0", 0.0), ("0.0", 0.0)], ("nan", "-1", "inf", "soon")),
    "metrics_host": ([("::1", "::1")], ()),
    "metrics_port": ([("0", 0), ("9100", 9100)], (*REFUSED_NUMBERS, "99999", "tcp://10.0.0.1:9100")),
    "transport": ([("shm", "shm"), ("grpc", "grpc")], ("udp", "SHM")),
    "wire": (
        [("int4", ("int4", "int4")), ("int8,bfloat16", ("int8", "bfloat16"))],
        ("int2", "int4,", "int4,int4,int4", "INT4"),
    ),
    "shared_directory": ([("/shared", Path("/shared"))], ()),
    "native": ([("off", "off"), ("auto", "auto")], ("on", "OFF", "build")),
    "tls_cert": ([], ("no/such.pem",)),
    "tls_key": ([], ("no/such.pem",)),
    "tls_ca": ([], ("no/such.pem",)),
    "token_file": ([], ()),  # is read when it is needed
    "insecure": ([("yes", True), ("off", False)], ("maybe",)),
    "metrics_insecure": ([("on", True), ("off", False)], ("maybe",)),
    "take_over": ([("yes", True), ("0", False)], ("maybe",)),
    "timeline": ([("/dev/shm/trace.json", Path("/dev/shm/trace.json"))], ("no/such/trace.json",)),
    "timeline_first": ([("3", 3)], (*REFUSED_NUMBERS, "0")),
    "timeline_steps": ([("20", 20)], (*REFUSED_NUMBERS, "0")),
    "log_level": ([("debug", "debug"), ("error", "error")], ("loud", "INFO")),
    "log_format": ([("json", "json"), ("text", "text")], ("xml",)),
}
CASES = [(name, text, value) for name, (taken, _) in TABLE.items() for text, value in taken]
BAD = [(name, text) for name, (_, refused) in TABLE.items() for text in refused]
SWITCHES = ("elastic", "insecure", "metrics_insecure", "take_over")
BASE = {"server": "h:9", "world_size": "8", "rank": "2"}
TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}


def test_the_table_has_every_setting_of_a_worker_and_connect_takes_no_other() -> None:
    names = [setting.name for setting in SETTINGS]
    assert list(TABLE) == names
    keywords = set(inspect.signature(ps_worker.connect).parameters)
    assert keywords <= {*names, *(setting.name for setting in OWN_SETTINGS)}
    without = {"start_timeout", "group_timeout", "step_timeout", "busy_seconds", "wire", "native", "log_level"}
    assert {*names, "rank"} - keywords == {*without, "log_format"}


def test_a_quorum_is_a_part_of_the_rule_as_flag_variable_and_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = Consistency(0, True, -1, 0.5)
    given = {"server": "h:1", "rank": 0, "world_size": 4}
    assert resolve(**given, quorum="all-1", quorum_grace=0.5).consistency == rule
    assert resolve(**given, quorum=3).consistency == Consistency(0, True, 3)
    flags = ["--server=h:1", "--workers=4", "--quorum=all-1", "--quorum-grace=0.5"]
    assert launched(monkeypatch, flags, {}).consistency == rule
    assert launched(monkeypatch, flags[:2], {"PS_QUORUM": "all-1", "PS_QUORUM_GRACE": "0.5"}).consistency == rule
    for refused in (["--mode=async"], ["--workers=1"], ["--quorum=all-4"], ["--quorum=4"]):
        with pytest.raises(InvalidRequest, match="quorum"):
            launched(monkeypatch, [*flags, *refused], {})


def launched(monkeypatch: pytest.MonkeyPatch, flags: list[str], variables: dict[str, str]) -> WorkerConfig:
    """What the first worker of `ps-worker run` finds, in the environment that the launcher gives it."""
    with monkeypatch.context() as patch:
        set_variables(patch, variables)
        arguments = ps_worker.cli.parser().read(["run", "--server=h:9", *flags, __file__])
        set_variables(patch, worker_environment(ps_worker.cli.launch_of(arguments), 0, {}))
        return resolve()


def told(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], **arguments: object) -> WorkerConfig:
    """What `connect` finds."""
    with monkeypatch.context() as patch:
        set_variables(patch, variables)
        return resolve(**arguments)


def set_variables(patch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        patch.setenv(name, value)


def entries(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> dict[str, Callable[[], WorkerConfig]]:
    """The ways in which a setting can be given."""
    variable, flag = "PS_" + name.upper(), "--" + name.replace("_", "-")
    base = {key: value for key, value in BASE.items() if key != name}
    flags = [f"--first-rank={base.get('rank', '0')}"] if name != "world_size" else []
    flags += ["--world-size=8"] if name != "world_size" else []
    found: dict[str, Callable[[], WorkerConfig]] = {
        "an argument of connect": lambda: told(monkeypatch, {}, **base | {name: text}),
        "a variable, read by connect": lambda: told(monkeypatch, {variable: text}, **base),
        "a variable, read by ps-worker run": lambda: launched(monkeypatch, flags, {variable: text}),
    }
    if name == "server":  # the flag would hide the variable
        del found["a variable, read by ps-worker run"]
    if name not in SWITCHES:
        found["a flag"] = lambda: launched(monkeypatch, [*flags, f"{flag}={text}"], {})
    elif text in ("1", "yes", "on"):
        found["a flag"] = lambda: launched(monkeypatch, [*flags, flag], {})
    return found


@pytest.mark.parametrize(("name", "text", "value"), CASES)
def test_a_setting_means_the_same_wherever_it_is_given(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: object
) -> None:
    for entry, find in entries(monkeypatch, name, text).items():
        config = find()
        elsewhere = {
            "elastic": config.world_size == 0,
            "insecure": config.access.insecure,
            "take_over": config.launch.take_over,
        }
        found = elsewhere.get(name, getattr(config, name, None))
        assert found == value, entry


@pytest.mark.parametrize(("name", "text"), BAD)
def test_a_bad_value_is_refused_wherever_it_is_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    for entry, find in entries(monkeypatch, name, text).items():
        with pytest.raises((InvalidRequest, SystemExit)) as caught:
            find()
        if isinstance(caught.value, SystemExit):
            assert caught.value.code == 2, entry
            said = capsys.readouterr().err
            assert f"argument --{name.replace('_', '-')}: " in said, entry
            assert said.count("\n") == 3, "two lines of usage, and one that says it all"
        else:
            said = str(caught.value)
        assert text in said, entry
        if entry.startswith("a variable") and not name.startswith("tls"):
            assert "PS_" + name.upper() in said, entry


def test_a_variable_that_kubernetes_set_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    advice = "Kubernetes sets it for a Service of that name: say enableServiceLinks: false"
    monkeypatch.setenv("PS_PORT", "tcp://10.0.0.1:50051")
    monkeypatch.setenv("PS_METRICS_PORT", "tcp://10.0.0.1:9100")
    with pytest.raises(InvalidRequest, match=f"PS_METRICS_PORT: expected a whole number .*; {advice}"):
        resolve()
    with pytest.raises(SystemExit):
        ps_server.cli.parser().read(["up", "--metrics-port", "0"])
    refusal = "expected a whole number from 0 to 65535, got 'tcp://10.0.0.1:50051'"
    assert f"argument --port: {refusal} (from PS_PORT; {advice}" in capsys.readouterr().err
    found = ps_server.cli.parser().read(["up", "--port", "7", "--metrics-port", "0"])
    assert found.port == 7, "a flag comes before its variable, whatever that holds"


def test_arguments_come_before_variables_of_ours_before_those_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(variables: dict[str, str], **arguments: object) -> tuple[object, ...]:
        config = told(monkeypatch, variables, **arguments)
        return config.server, config.mode, config.consistency, config.job, config.rank, config.world_size

    ours = {"PS_SERVER": "ps:1", "PS_MODE": "ssp:2", "PS_JOB": "mine", "PS_RANK": "3", "PS_WORLD_SIZE": "5"}
    arguments = {"server": "h:2", "mode": "async", "job": "other", "rank": 0, "world_size": 1}
    assert found({**TORCHRUN, **ours}) == ("ps:1", "ssp:2", Consistency(2), "mine", 3, 5)
    assert found({**TORCHRUN, **ours}, **arguments) == ("h:2", "async", Consistency(None), "other", 0, 1)
    assert found({**TORCHRUN, "PS_SERVER": "ps:1"}) == ("ps:1", "sync", Consistency(0, aggregate=True), "default", 2, 4)
    empty = dict.fromkeys([*TORCHRUN, *ours, "PS_ELASTIC", "PS_CONNECT_TIMEOUT"], "")
    assert told(monkeypatch, empty) == told(monkeypatch, {}), "an empty variable is as good as none"


@pytest.mark.parametrize(
    ("variables", "arguments", "mode"),
    [
        ({}, {}, "single"),
        (TORCHRUN, {}, "ddp"),
        ({"WORLD_SIZE": "1", "RANK": "0"}, {}, "single"),
        ({**TORCHRUN, "PS_SERVER": "ps:1"}, {}, "sync"),
        ({"PS_SERVER": "ps:1"}, {"mode": "single"}, "single"),
    ],
)
def test_the_mode_follows_from_what_there_is(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], arguments: dict[str, str], mode: str
) -> None:
    assert told(monkeypatch, variables, **arguments).mode == mode


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"mode": "sync"}, "mode sync needs a server: connect.server='HOST:PORT'., PS_SERVER, or --server"),
        ({"mode": "ssp:1"}, "mode ssp:1 needs a server"),
        ({"server": "h:1", "world_size": 2}, "world_size is 2, but no rank was given"),
        ({"server": "h:1", "world_size": 2, "rank": 2}, "rank must be from 0 to world_size - 1 = 1, got 2"),
        ({"server": "h:1", "world_size": 2, "rank": -1}, "rank: expected a whole number from 0 .*, got '-1'"),
        ({"server": "h:1", "rank": 1}, "rank must be from 0 to world_size - 1 = 0, got 1"),
        ({"mode": "ddp", "elastic": True}, "an elastic job needs a server; mode ddp has a fixed world size"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        ps_worker.connect(**arguments)  # type: ignore[arg-type]


# -- the servers' settings -------------------------------------------------------------------------------------------

PLAIN = ServerConfig(index=1, coordinator="h:1", port=50051, metrics_port=9100)
FLAGS = (
    *("--host=::1", "--port=7", "--metrics-host=localhost", "--metrics-port=0", "--lease=2.5", "--apply-threads=3"),
    *("--shared-directory=/shared", "--tokens=tokens", "--insecure", "--checkpoint-dir=kept", "--checkpoint-every=9s"),
    *("--keep=7", "--restore", "--max-jobs=3", "--max-caller-bytes=99999999999", "--max-push-norm=2.5"),
    "--max-handshake-seconds=1.5",
)
MANY = ServerConfig(
    index=1,
    coordinator="h:1",
    host="::1",
    port=7,
    metrics_host="localhost",
    lease=2.5,
    apply_threads=3,
    shared_directory=Path("/shared"),
    tokens=Path("tokens"),
    insecure=True,
    checkpoint_dir=Path("kept"),
    checkpoint_every="9s",
    keep=7,
    restore=True,
    limits=Limits(jobs=3, caller_bytes=99999999999, push_norm=2.5, handshake_seconds=1.5),
)


@pytest.mark.parametrize(("flags", "config"), [((), PLAIN), (FLAGS, MANY)], ids=["none", "many"])
def test_what_a_cluster_is_told_reaches_its_shards_as_variables(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], config: ServerConfig
) -> None:
    told = ps_server.cli.parser().read(["up", *flags])
    set_variables(monkeypatch, as_variables(SERVER_SETTINGS, told))
    heard = ps_server.cli.parser().read(["shard", "--index", "1"])
    assert {s.name: getattr(heard, s.name) for s in SERVER_SETTINGS} == {
        s.name: getattr(told, s.name) for s in SERVER_SETTINGS
    }
    assert config_of(heard, None, 1, "h:1") == config


def test_a_flag_without_a_value_counts_for_a_child_whatever_the_parent_inherited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_variables(monkeypatch, {"PS_CHECKPOINT_DIR": "/old"})
    told = ps_server.cli.parser().read(["up", "--checkpoint-dir="])
    variables = as_variables(SERVER_SETTINGS, told)
    assert (told.checkpoint_dir, variables["PS_CHECKPOINT_DIR"]) == (None, "")
    assert "PS_TOKENS" not in variables, "a script that looks into its environment finds only what was given"
    set_variables(monkeypatch, variables)
    assert ps_server.cli.parser().read(["shard", "--index", "1"]).checkpoint_dir is None


# -- variables that nothing reads ------------------------------------------------------------------------------------


def declared(root: CommandLine) -> set[str]:
    """The variables that the help of a command's flags names."""
    commands = next(action for action in root._actions if isinstance(action.choices, dict))
    assert isinstance(commands.choices, dict)
    texts = [str(action.help) for command in commands.choices.values() for action in command._actions]
    return {name for text in texts for name in re.findall(r"\[(PS_[A-Z_]+)", text)}


def test_every_variable_that_is_read_is_known() -> None:
    own = {setting.variable for setting in (*SETTINGS, *OWN_SETTINGS)}
    told_by_the_launcher = {LAUNCHED, STARTED_FILE, LAUNCH_ID, LAUNCH_RANKS, "PS_RESTART_COUNT", FAILPOINTS}
    read = declared(ps_server.cli.parser()) | declared(ps_worker.cli.parser()) | own | told_by_the_launcher
    assert read - KNOWN_VARIABLES == set()
    compose = KNOWN_VARIABLES - read
    text = "".join(path.read_text() for path in Path(__file__).parents[2].glob("docker-compose*.yml"))
    assert {name for name in compose if name not in text} == set(), "a name that nothing reads any more"


def test_a_variable_that_nothing_reads_is_named_with_the_nearest_that_something_does() -> None:
    assert unknown_variables({"PS_SHARDS": "3", "PATH": "/bin", "PSX": "1"}) is None
    assert unknown_variables({"PS_SHARDZ": "3"}) == (
        "the variable PS_SHARDZ is not known and has no effect, did you mean PS_SHARDS?"
    )
    assert unknown_variables({"PS_XYZZY_Q": ""}) == "the variable PS_XYZZY_Q is not known and has no effect"


def test_the_variables_of_kubernetes_and_of_the_program_ps_are_no_mistakes() -> None:
    service = {
        "PS_SERVICE_HOST": "10.0.0.1",
        "PS_SERVICE_PORT": "1",
        "PS_SERVICE_PORT_GRPC": "1",
        "PS_PORT_1_TCP": "tcp://10.0.0.1:1",
        "PS_PORT_1_TCP_ADDR": "10.0.0.1",
        "PS_SHARDS_PORT": "tcp://10.0.0.1:1",
    }
    assert unknown_variables({**service, "PS_FORMAT": "pid"}) is None


# -- the place that a launcher gives ---------------------------------------------------------------------------------

SLURM = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_LOCALID": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
KUBERNETES = {"JOB_COMPLETION_INDEX": "3"}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        (TORCHRUN, (2, 4, 1)),
        (SLURM, (5, 6, 2)),
        (OPEN_MPI, (1, 3, 1)),
        ({**KUBERNETES, "PS_WORLD_SIZE": "8"}, (3, 8, 0)),
        ({**SLURM, **TORCHRUN}, (2, 4, 1)),
        ({**SLURM, **OPEN_MPI}, (5, 6, 2)),
        ({**SLURM, "PS_RANK": "7", "PS_WORLD_SIZE": "9", "PS_LOCAL_RANK": "3"}, (7, 9, 3)),
        ({**SLURM, "PS_WORLD_SIZE": "9"}, (5, 9, 2)),
        ({**SLURM, "SLURM_STEP_ID": ""}, (0, 1, 0)),  # a batch script that no srun has started
        ({**SLURM, "WORLD_SIZE": "4"}, (5, 6, 2)),  # half of torchrun's, which many job scripts set
        ({**KUBERNETES, **TORCHRUN}, (2, 4, 1)),
        ({"LOCAL_RANK": "1"}, (0, 1, 1)),
    ],
)
def test_rank_and_number_of_workers_come_from_one_launcher(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], place: tuple[int, int, int]
) -> None:
    found = told(monkeypatch, variables, server="h:1")
    assert (found.rank, found.world_size, found.local_rank) == place


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "2"}, "RANK is set, but WORLD_SIZE is not: set both, or PS_RANK and PS_WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set, but RANK is not"),
        (KUBERNETES, r"JOB_COMPLETION_INDEX says that this is worker 3, but not of how many: set PS_WORLD_SIZE"),
        ({**KUBERNETES, "PS_WORLD_SIZE": "3"}, "rank must be from 0 to world_size - 1 = 2, got 3"),
        ({"RANK": "first", "WORLD_SIZE": "2"}, "RANK: expected a whole number, got 'first'"),
    ],
)
def test_half_a_place_is_refused(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        told(monkeypatch, variables, server="h:1")


def test_half_a_place_does_not_matter_where_none_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, KUBERNETES).mode == "single"
    elastic = told(monkeypatch, {**KUBERNETES, "PS_RANK": "1"}, server="h:1", elastic=True)
    assert (elastic.rank, elastic.world_size) == (None, 0)
    assert told(monkeypatch, {"RANK": "3"}, mode="single").rank == 0


# -- what the launcher tells its workers -----------------------------------------------------------------------------

STALE = {"RANK": "9", "WORLD_SIZE": "10", "MASTER_ADDR": "old", "TORCHELASTIC_RUN_ID": "x", "PS_RANK": "9"}


def a_launch(mode: str, **changes: object) -> Launch:
    values = {"workers": 2, "first_rank": 2, "world_size": 4, "elastic": False, "settings": {"PS_MODE": mode}}
    return Launch(command=("train.py",), mode=mode, **values | changes)  # type: ignore[arg-type]


def torchruns(environment: dict[str, str]) -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: environment[name] for name in names if name in environment}


@pytest.mark.parametrize("mode", ["single", "sync", "ssp:1", "async"])
def test_nothing_of_torchruns_environment_reaches_a_worker_outside_ddp(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    set_variables(monkeypatch, STALE)
    found = worker_environment(a_launch(mode), 1, {})
    assert torchruns(found) == {}
    assert "TORCHELASTIC_RUN_ID" not in found
    assert (found["PS_RANK"], found["PS_WORLD_SIZE"], found["PS_LOCAL_RANK"]) == ("3", "4", "1")
    assert "PS_RANK" not in worker_environment(a_launch(mode, elastic=True), 1, {})


def test_in_ddp_torchruns_environment_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, STALE)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    found = worker_environment(a_launch("ddp"), 1, meeting)
    place = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert torchruns(found) == {**place, **meeting}


def test_ddp_on_several_machines_needs_to_know_where_they_meet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["ps-worker", "run", "--mode", "ddp", "--workers", "2", "--world-size", "4", __file__]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as caught:
        ps_worker.cli.main()
    assert "ddp on several machines needs MASTER_ADDR and MASTER_PORT" in str(caught.value.code)


# -- the command lines -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            ["ps-server", "up", "--shrads", "3"],
            "usage: ps-server up [options]\nps-server up: unknown option --shrads, did you mean --shards? "
            "(see ps-server up --help)\n",
        ),
        (
            ["ps-server", "up", "--port", "many"],
            "usage: ps-server up [options]\nps-server up: argument --port: expected a whole number from 0 to 65535, "
            "got 'many' (see ps-server up --help)\n",
        ),
        (
            ["ps-server", "status", "now"],
            "usage: ps-server status [options]\nps-server status: unknown argument now (see ps-server status --help)\n",
        ),
        (
            ["ps-server", "statsu"],
            "usage: ps-server [-h] [--version] COMMAND ...\nps-server: unknown command statsu, did you mean status? "
            "(see ps-server --help)\n",
        ),
        (
            ["ps-server", "config", "shrad", "--port", "7000"],
            "usage: ps-server [-h] [--version] COMMAND ...\nps-server: unknown command shrad, did you mean shard? "
            "(see ps-server --help)\n",
        ),
        (
            ["ps-server", "xyz"],
            "usage: ps-server [-h] [--version] COMMAND ...\nps-server: unknown command xyz (see ps-server --help)\n",
        ),
        (
            ["ps-worker", "rnu", "train.py"],
            "usage: ps-worker [-h] [--version] COMMAND ...\nps-worker: unknown command rnu, did you mean run? "
            "(see ps-worker --help)\n",
        ),
    ],
)
def test_a_mistake_is_answered_by_the_subcommand_in_two_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str], said: str
) -> None:
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as caught:
        (ps_server.cli if command[0] == "ps-server" else ps_worker.cli).main()
    assert caught.value.code == 2
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("program", [ps_server.cli, ps_worker.cli])
def test_a_program_without_a_command_shows_its_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], program: ModuleType
) -> None:
    monkeypatch.setattr(sys, "argv", ["a program"])
    with pytest.raises(SystemExit) as caught:
        program.main()
    assert caught.value.code == 2, "a script that forgets the command has made a mistake"
    assert capsys.readouterr().err == program.parser().format_help()


def test_help_begins_with_what_people_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = ps_server.cli.parser().format_help()
    names = re.findall(r"^    ([a-z-]+)  +\w", text, re.MULTILINE)
    assert names[:3] == ["up", "status", "page"]
    assert names[-1] == "report", "launchers call it"
    assert set(names) == set(ps_server.cli.parser()._commands.choices), "each is on a line with its help"  # type: ignore[union-attr]


@pytest.mark.parametrize("command", [ps_server.cli, ps_worker.cli])
def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str], command: object) -> None:
    with pytest.raises(SystemExit) as caught:
        command.parser().read(["--version"])  # type: ignore[attr-defined]
    assert caught.value.code == 0
    assert capsys.readouterr().out in ("ps-server 0.1.0\n", "ps-worker 0.1.0\n")
