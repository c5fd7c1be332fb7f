"""The state of a cluster as text: the output of `ps-server status`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from ps_runtime.quantities import counted, ranges, ranks_text, size_text
from ps_server.core.agreement import Agreement
from ps_server.ops.columns import folded, lines_of, printable

MOST_RELAYS = 8  # relays of a job that have a line of their own
FEWER = 1.05  # the least ratio that is shown: below it the bytes are those of sync, with some padding


def waits(status: dict[str, Any], job: str) -> dict[int, list[dict[str, Any]]]:
    """Returns the waits of a job's workers, by rank: an entry for each shard on which a worker waits."""
    ranks: dict[int, list[dict[str, Any]]] = {}
    for held in _held(status, job):
        for wait in held["waits"]:
            ranks.setdefault(wait["rank"], []).append(wait)
    return ranks


# Columns that are left out of a narrow window, in this order.
DROPPED = ("METRICS", "PID", "TABLES", "OPTIMIZER", "RESTARTS", "VERSION", "ADDRESS", "JOB")


def table(status: dict[str, Any], width: int | None = None) -> str:
    """Returns the state as a table for a person. width: the window's; None: no limit"""
    lines = process_lines(status, width, workers=True)
    for job in status["jobs"]:
        lines += [each for line in job_lines(status, job) for each in folded(line, width)]
    if status["coordinator"]["software_version"]:  # servers of earlier versions do not report it
        who = "this relay" if status["coordinator"].get("upstream") else "the coordinator"
        lines += folded(printable(f"{who} runs ps-torch {status['coordinator']['software_version']}"), width)
    return "\n".join(lines)


def job_lines(status: dict[str, Any], job: dict[str, Any]) -> list[str]:
    """Returns lines about a job: its mode and progress, its readers and tables, how its buckets travel, and bytes of a
    step.
    """
    lines = [] if status["coordinator"].get("upstream") else _job_lines(job)  # a relay has no workers
    return [
        *map(printable, lines + _feeds(status, job) + _tables(status, job) + _ways(status, job) + _bytes(status, job))
    ]


def _feeds(status: dict[str, Any], job: dict[str, Any]) -> list[str]:
    """Returns lines about the readers of a job's weights: one for all shards together, or one for each wire format of a
    relay.
    """
    if status["coordinator"].get("upstream"):
        lines = [f"job {job['name']}: {_feed_text(feed)}" for feed in _fed(status, job["name"])]
    else:
        feed = _of_all_shards(status, job["name"])
        lines = [] if feed is None else [f"  weights are read: {_feed_text(feed)}"]
    return lines + relay_lines(status, job["name"])


def _relays(status: dict[str, Any], job: str) -> list[dict[str, Any]]:
    """Returns the last report of each of a job's relays, those with the most readers first.

    A relay reports to all shards. Of its reports to the shards that answer, the one with the highest version is the
    last.
    """
    reported: dict[str, dict[str, Any]] = {}
    for feed in _fed(status, job):
        for relay in feed["relays"]:
            reported[relay["name"]] = max(reported.get(relay["name"], relay), relay, key=_newer)
    return sorted(reported.values(), key=lambda relay: (-relay["reader_count"], relay["name"]))


def _fed(status: dict[str, Any], job: str) -> list[dict[str, Any]]:
    """Returns the `feed` of a job from each shard, or in each wire format of a relay."""
    return [held["feed"] for held in _held(status, job) if held.get("feed")]


def _newer(relay: dict[str, Any]) -> tuple[int, int, int]:
    version = -1 if relay["edition_version"] is None else relay["edition_version"]
    return version, relay["behind"], relay["reader_count"]


def relay_lines(status: dict[str, Any], job: str) -> list[str]:
    """Returns a line for each of a job's relays with the most readers, and one for all others."""
    relays = _relays(status, job)
    shown, feeds = relays[:MOST_RELAYS], _fed(status, job)
    lines = [f"    relay {each['name']} tells of {_relay_text(each)}" for each in shown]
    # A shard counts all relays, and names those with the most readers. Shards may have heard of different ones.
    more = max([len(relays), *(feed["relay_count"] for feed in feeds)]) - len(shown)
    known, counts = (sum(each["reader_count"] for each in some) for some in (relays, shown))
    readers = max([known, *(feed["relayed_reader_count"] for feed in feeds)]) - counts
    return [*lines, f"    and {counted(more, 'more relay')} with {counted(readers, 'reader')}"] if more else lines


def _relay_text(relay: dict[str, Any]) -> str:
    edition, readers = relay["edition_version"], counted(relay["reader_count"], "reader")
    if edition is None:
        return f"{readers}, and of no edition"
    return f"{readers}; its edition {edition} is {counted(relay['behind'], 'update')} behind"


def _of_all_shards(status: dict[str, Any], job: str) -> dict[str, Any] | None:
    """Returns the figures of a job's readers over the shards that answer; None if there is no reader.

    A reader pulls from all shards, and has an edition when it has each shard's buckets.
    """
    feeds = {
        shard["index"]: held["feed"]
        for shard in status["shards"]
        for held in shard["jobs"]
        if held["job"] == job and held.get("feed")
    }
    if not feeds:
        return None

    def all_of(name: str) -> list[Any]:
        return [feed[name] for feed in feeds.values() if feed[name] is not None]

    troubles = [f"shard {index}: {feed['trouble']}" for index, feed in feeds.items() if feed["trouble"]]
    return {
        "reader_count": max(all_of("reader_count")),
        "edition_version": min(all_of("edition_version"), default=None),
        "age_duration": max(all_of("age_duration"), default=None),
        "behind": max(all_of("behind")),
        **{name: sum(all_of(name)) for name in ("size_bytes", "sent_bytes", "element_bytes", "held_bytes")},
        "mapped_reader_count": max(all_of("mapped_reader_count")),
        "trouble": troubles[0] if troubles else "",
    }


def _feed_text(feed: dict[str, Any]) -> str:
    has_one = feed["edition_version"] is not None
    text = f"edition {feed['edition_version']}, {feed['age_duration']:.1f} s old, " if has_one else ""
    text += f"{counted(feed['behind'], 'update')} behind, {counted(feed['reader_count'], 'reader')}, "
    if feed["mapped_reader_count"]:
        text += f"{counted(feed['mapped_reader_count'], 'reader')} with its memory mapped, "
    text += f"{size_text(feed['size_bytes'])} in memory, "
    if feed["held_bytes"]:
        text += f"{size_text(feed['held_bytes'])} more that readers keep mapped, "
    text += f"{size_text(feed['sent_bytes'])} sent"
    if feed["element_bytes"] > feed["sent_bytes"]:
        text += f" in place of {size_text(feed['element_bytes'])}"
    return text + (f"; {feed['trouble']}" if feed["trouble"] else "")


def process_lines(status: dict[str, Any], width: int | None = None, workers: bool = False) -> list[str]:
    """Returns a line for each server process, and with `workers` one for each worker."""
    columns = ("ROLE", "INDEX", "PID", "ADDRESS", "METRICS", "RESTARTS", "JOB", "CLOCK", "VERSION")
    rows: list[tuple[str, ...]] = [(*columns, "WEIGHTS", "OPTIMIZER", "TABLES", "WAITS FOR")]
    upstream = status["coordinator"].get("upstream")
    if not upstream:
        rows.append((*_process("coordinator", 0, status["coordinator"]), *_NOTHING, "-"))
    for shard in status["shards"]:
        head = _process("relay" if upstream else "shard", shard["index"], shard, str(shard["restart_count"]))
        if not shard["reachable"]:
            rows.append((*head, *_NOTHING, "does not answer"))
            continue
        rows += [(*head, *_shard_columns(job), "-") for job in shard["jobs"]] or [(*head, *_NOTHING, "-")]
    for job in status["jobs"] if workers else ():
        waiting = waits(status, job["name"])
        for worker in job["workers"]:
            head = _process(_role(job), worker["rank"], {**worker, "address": worker["host"]})
            reason = _wait(waiting.get(worker["rank"], []))
            rows.append((*head, job["name"], str(worker["clock"]), *_NOTHING[2:], reason))
    return lines_of([tuple(map(printable, row)) for row in rows], width, DROPPED)


def _role(job: dict[str, Any]) -> str:
    """Returns the role of a job's worker in the table. A group of processes has one line, of its first member."""
    return f"group of {job['group_size']}" if job["group_size"] > 1 else "worker"


def _process(role: str, index: int, process: dict[str, Any], restarts: str = "-") -> tuple[str, ...]:
    return role, str(index), str(process["pid"]), process["address"], process["metrics_address"], restarts


_NOTHING = ("-",) * 6  # in the columns of `_shard_columns`


def _shard_columns(job: dict[str, Any]) -> tuple[str, ...]:
    low, high = job["versions"]["min_version"], job["versions"]["max_version"]
    versions = _range((low, high))
    clocks = _range(job["versions"]["clocks"].values())
    tables = size_text(sum(table["size_bytes"] for table in job["tables"])) if job["tables"] else "-"
    sizes = size_text(job["parameter_bytes"]), size_text(job["optimizer_bytes"]), tables
    return job["job"], clocks, versions, *sizes


def _range(numbers: Collection[int]) -> str:
    """Returns the least and the greatest number as text; only one if they are equal, and a dash if there is none."""
    if not numbers:
        return "-"
    return str(min(numbers)) if min(numbers) == max(numbers) else f"{min(numbers)}-{max(numbers)}"


def _wait(waits: list[dict[str, Any]]) -> str:
    if not waits:
        return "-"
    ranks = sorted({rank for wait in waits for rank in wait["awaited_ranks"]})
    awaited = ranks_text(ranks) if ranks else "its shard"
    return f"{awaited} ({waits[0]['reason']})"


def mode_text(job: dict[str, Any]) -> str:
    """Returns a job's mode, as scripts call it."""
    return job["mode"] or "unknown mode"


def clock_unit(job: dict[str, Any]) -> str:
    """Returns what the clocks of a job count, in the words of its users."""
    return "rounds" if job["mode"].startswith("local:") else "steps"


def steps_text(job: dict[str, Any]) -> str:
    """Returns a job's progress in steps as text; empty if no script announces its number of steps."""
    reported = [worker["figures"] for worker in job["workers"] if worker["figures"]]
    reported = [figures for figures in reported if figures.get("total_step_count")]
    if not reported:
        return ""
    done = [figures["done_step_count"] for figures in reported]
    return f"step {_range(done)} of {max(figures['total_step_count'] for figures in reported)}"


def _job_lines(job: dict[str, Any]) -> list[str]:
    ranks, size = [worker["rank"] for worker in job["workers"]], job["world_size"]
    workers = f"{len(ranks)} of {size} workers" if size else f"{len(ranks)} workers, elastic"
    workers += f", each a {_role(job)} processes" if job["group_size"] > 1 else ""
    missing = sorted(set(range(size)) - set(ranks))
    waiting = f"; waits for ranks {ranges(missing)} to join" if missing and not job["started"] else ""
    if job["rejoining_ranks"]:
        waiting = f"; waits for {ranks_text(job['rejoining_ranks'])} to join again"
    if job["absent_ranks"]:
        absent = ranks_text(job["absent_ranks"])
        waiting = f"; all others have left, and it waits for {absent} to come back before it ends"
    return [
        f"job {job['name']}: {mode_text(job)}, {workers}{waiting}; "
        f"{size_text(job['parameter_bytes'])} in {counted(job['bucket_count'], 'bucket')}, "
        f"imbalance {job['imbalance']:.2f}{f'; {steps}' if (steps := steps_text(job)) else ''}{_history(job)}",
        *(
            f"  loader {loader['loader']}: pass {loader['pass_number']}, {loader['committed_count']} of "
            f"{loader['sample_count']} samples committed, {loader['leased_count']} leased; "
            f"{loader['returned_count']} came back so far"
            for loader in job["loaders"]
        ),
    ]


def _ways(status: dict[str, Any], job: dict[str, Any]) -> list[str]:
    """Returns one line on how buckets travel between the workers of a job and the shards: none without workers."""
    held = _held(status, job["name"])
    ways: dict[str, list[int]] = {}
    for rank in [worker["rank"] for worker in job["workers"]] if held else []:
        if all(rank in each["sharing_ranks"] for each in held):
            way = "in shared memory"
        elif all(rank in each["connected_ranks"] for each in held):
            way = "over data connections"
        else:
            some = any(rank in each["sharing_ranks"] + each["connected_ranks"] for each in held)
            way = "by gRPC to some shards" if some else "by gRPC"
        ways.setdefault(way, []).append(rank)
    reported = [f"{way} (ranks {ranges(sorted(ranks))})" for way, ranks in ways.items()]
    return ["  buckets travel " + ", ".join(reported)] if reported else []


def _bytes(status: dict[str, Any], job: dict[str, Any]) -> list[str]:
    """Returns lines about the bytes of a worker's step, the residual of its wire format, and how alike workers move, as
    far as these are known.
    """
    figures = [worker["figures"] for worker in job["workers"] if worker["figures"]]
    steps, lines = sum(each["step_count"] for each in figures), []
    if steps:
        sent, received = (sum(each[name] for each in figures) / steps for name in ("sent_bytes", "received_bytes"))
        lines.append(f"  a step sends {size_text(round(sent))} and receives {size_text(round(received))} on average")
        full = 0 if any(held["tables"] for held in _held(status, job["name"])) else job["trained_bytes"]
        if 2 * full > FEWER * (sent + received) > 0:
            fewer = 2 * full / (sent + received)
            lines[-1] += f", {fewer:.1f} times fewer bytes than in sync as float32: {size_text(full)} each way"
    ratios = [each["residual_ratio"] for each in figures if each["residual_ratio"] is not None]
    if ratios:
        lines.append(
            f"  the wire format has left out {max(ratios):.2f} of what a step pushes at most, and sends it later"
        )
    agreement = round_agreement(status, job["name"])
    if agreement is not None:
        lines.append(f"  workers agree to {agreement:.2f} in their last round: 1 is alike, {_unrelated(job)} unrelated")
    return lines


def _unrelated(job: dict[str, Any]) -> str:
    return f"{1 / max(1, len(job['workers'])):.2f}"


def _held(status: dict[str, Any], job: str) -> list[dict[str, Any]]:
    """Returns a job's status on each shard that answers."""
    return [held for shard in status["shards"] for held in shard["jobs"] if held["job"] == job]


def round_agreement(status: dict[str, Any], job: str) -> float | None:
    """Returns how alike the workers of a job in local:H have moved in its last rounds; None: unknown."""
    known = [Agreement(**held["agreement"]) for held in _held(status, job) if held["agreement"]]
    return sum(known, Agreement()).ratio


def tables(status: dict[str, Any], job: str) -> dict[str, dict[str, Any]]:
    """Returns the figures of a job's tables by name, summed over the shards that answer."""
    total: dict[str, dict[str, Any]] = {}
    for held in _held(status, job):
        for part in held["tables"]:
            before = total.setdefault(part["table"], dict.fromkeys(part, 0))
            total[part["table"]] = {
                name: value if name == "table" else before[name] + value for name, value in part.items()
            }
    return total


def _tables(status: dict[str, Any], job: dict[str, Any]) -> list[str]:
    """Returns one line about each table of a job, and one about its workers' look-ups."""
    lines = [
        f"  table {name}: {counted(table['row_count'], 'row')}, {size_text(table['size_bytes'])}; "
        f"{table['admitted_row_count']} admitted, {table['expired_row_count']} expired, "
        f"{table['evicted_row_count']} evicted{_found(table)}{_in_file(table)}"
        for name, table in tables(status, job["name"]).items()
    ]
    figures = [worker["figures"] for worker in job["workers"] if worker["figures"]]
    distinct = sum(each["distinct_id_count"] for each in figures)
    if distinct:
        ratio = sum(each["looked_up_id_count"] for each in figures) / distinct
        lines.append(f"  an id comes {ratio:.1f} times in a lookup, on average")
    return [*lines, *_libraries(status)] if lines else []


def _libraries(status: dict[str, Any]) -> list[str]:
    """Returns a line about the library that shards use for tables, if they report it."""
    used = Counter(shard["figures"]["table_library"] for shard in status["shards"] if shard["figures"])
    del used[""]  # servers of an earlier version
    each = [
        f"{'numpy' if name == 'numpy' else f'the library for {name}'}"
        + (f" ({counted(count, 'shard')})" if len(used) > 1 else "")
        for name, count in sorted(used.items())
    ]
    return [f"  tables on the shards: {', '.join(each)}"] if each else []


def _found(table: dict[str, Any]) -> str:
    """Returns the fraction of looked-up ids that had a row, as text; empty if none was looked up."""
    found, asked = table["found_id_count"], table["found_id_count"] + table["missing_id_count"]
    return f"; {100 * found / asked:.1f} % of {counted(asked, 'id')} found" if asked else ""


def _in_file(table: dict[str, Any]) -> str:
    """Returns the number of a table's rows in files, and how often look-ups needed them, as text; empty if none is."""
    if not table["file_size_bytes"]:
        return ""
    found = table["found_id_count"]
    often = f", which {100 * table['cold_id_count'] / found:.1f} % of these needed" if found else ""
    return f"; {counted(table['file_row_count'], 'row')} in files of {size_text(table['file_size_bytes'])}{often}"


def _history(job: dict[str, Any]) -> str:
    """Returns a job's last checkpoint, rollbacks and lost steps, as text; empty if there are none."""
    text = ""
    if job["last_checkpoint"]:
        last = job["last_checkpoint"]
        text += f"; last checkpoint {last['name']}, after {last['clock']} {clock_unit(job)}"
        missing = job["last_checkpoint"]["missing_ranks"]
        text += f", without the state of workers {missing}" if missing else ""
    if job["restore_count"]:
        text += f"; rolled back {job['restore_count']} times, {job['redone_step_count']} steps made again"
    if job["lost_step_count"]:
        text += f"; {job['lost_step_count']} steps lost with shards"
    return text
