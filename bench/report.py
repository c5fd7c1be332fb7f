"""Writes the page of results, docs/benchmarks.md, from the lines of JSON in docs/benchmarks/."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from bench.results import MIB, Result
from bench.runs import merged

# What a table shows, in this order, where any line has it: the field, its heading, and how it is written.
COLUMNS = (
    ("scenario", "scenario", "{}"),
    ("system", "system", "{}"),
    ("transport", "transport", "{}"),
    ("wire", "wire", "{}"),
    ("workers", "workers", "{}"),
    ("members", "processes of each", "{}"),
    ("shards", "shards", "{}"),
    ("principals", "principals", "{}"),
    ("ms", "ms", "{:.4g}"),
    ("alone_ms", "alone, ms", "{:.4g}"),
    ("allowed_ms", "allowed, ms", "{:.4g}"),
    ("worst_ms", "worst, ms", "{:.4g}"),
    ("stalled_ms", "stalled, ms", "{:.3g}"),
    ("back_ms", "back, ms", "{:.4g}"),
    ("editions", "editions", "{}"),
    ("requests", "requests", "{}"),
    ("readings", "readings", "{}"),
    ("torn", "requests that saw two versions", "{}"),
    ("received_part", "bytes received / weights", "{:.3f}"),
    ("answers_per_core", "answers, a second and core", "{}"),
    ("calls_begun", "calls begun", "{}"),
    ("samples_per_second", "samples/s", "{:.0f}"),
    ("gigabytes_per_second", "GB/s", "{}"),
    ("moved_bytes", "MB on a worker's link, a step", "{:.1f}"),
    ("sent_bytes", "MB a worker sends", "{:.1f}"),
    ("received_bytes", "MB a worker receives", "{:.1f}"),
    ("predicted_bytes", "MB predicted, of a ring each way", "{:.1f}"),
    ("cpu_seconds_per_gigabyte", "CPU, s a GB", "{:.3f}"),
    ("cpu_ms", "CPU, ms a step", "{:.4g}"),
    ("page_faults", "page faults, a step", "{}"),
    ("shards_cpu_ms", "CPU of the shards, ms a step", "{:.2f}"),
    ("wakeups", "wake-ups a second", "{:.1f}"),
    ("workers_wakeups", "of the workers", "{:.1f}"),
    ("shards_wakeups", "of the shards", "{:.1f}"),
    ("idle_cpu_ms", "CPU, ms a second", "{:.2f}"),
    ("coordinator_cpu_seconds", "CPU of the coordinator, s", "{:.2f}"),
    ("shard_calls", "calls to shards", "{}"),
    ("rosters", "rosters sent", "{}"),
    ("roster_ranks", "ranks in them", "{}"),
    ("most_threads", "threads of the coordinator", "{}"),
    ("loss", "last loss", "{:.3f}"),
    ("difference", "largest difference to one process", "{:.1e}"),
    ("hsdp_difference", "largest difference to HSDP", "{:.1e}"),
    ("peak_bytes", "peak, MiB", "{:.0f}"),
    ("imports_bytes", "imports, MiB", "{:.0f}"),
    ("shared_bytes", "shared, MiB", "{:.0f}"),
    ("held_bytes", "weights + state, MiB", "{:.0f}"),
    ("compute", "compute", "{}"),
    ("fault_count", "faults", "{}"),
    ("pair_count", "pairs of kinds that overlapped", "{}"),
    ("lost_steps", "steps lost with shards, and counted", "{}"),
    ("launches", "launches", "{}"),
    ("violations", "violations", "{}"),
    ("not_measured", "time not measured, because", "{}"),
)
UNITS = {
    "moved_bytes": 1e6,
    "sent_bytes": 1e6,
    "received_bytes": 1e6,
    "predicted_bytes": 1e6,
    "peak_bytes": MIB,
    "imports_bytes": MIB,
    "shared_bytes": MIB,
    "held_bytes": MIB,
}


def write_page(folder: Path, modules: Mapping[str, ModuleType]) -> None:
    """Writes FOLDER.md from FOLDER/*.jsonl: a section for each benchmark, in their order, with the results of each of
    its files; at the end those without any."""
    found: dict[str, dict[str, list[Result]]] = {name: {} for name in modules}
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: path.stem):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        if lines:
            found[lines[0]["bench"]][path.stem] = merged(lines)
    page = [
        "# Benchmarks",
        "",
        "`python -m bench report` writes this page from the results in [benchmarks/](benchmarks). `make bench` runs a",
        "short form of all benchmarks and writes it anew. Every process computes with one thread. A ratio compares",
        "systems that take turns within one run; absolute times are those of the machine named. Of several runs, a",
        "figure is the median, and the smallest and the largest ratio stand beside it.",
    ]
    for name in sorted(modules, key=lambda name: not found[name]):
        page += ["", f"## {name}", "", *(modules[name].__doc__ or "").strip().splitlines()]
        for stem, lines in found[name].items():
            page += ["", f"### {stem}"] * (stem != name) + ["", *_results(folder, stem, lines)]
        if not found[name]:
            page += [
                "",
                "```console",
                f"$ python -m bench {name}",
                "```",
                "",
                "No results of it are in benchmarks/ yet.",
            ]
    folder.with_suffix(".md").write_text("\n".join(page) + "\n")


def _results(folder: Path, stem: str, lines: Sequence[Result]) -> list[str]:
    first = lines[0]
    used = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    found = [
        "```console",
        f"$ {first['command']}",
        "```",
        "",
        f"Weights: {first['bytes'] / MIB:.4g} MiB. Machine: {first['machine']}; {used}.{_runs(first)}",
        "",
        *_table(lines),
    ]
    if (folder / f"{stem}.png").exists():
        found += ["", f"![{stem}]({folder.name}/{stem}.png)"]
    return found


def _runs(line: Result) -> str:
    return f" Runs: {line['runs']}." if "runs" in line else ""


def _ratio(line: Result, peer: str) -> str:
    if peer not in line["ratios"]:
        return ""
    least, most = line.get("spread", {}).get(peer, (0, 0))
    form = ".3f" if peer.startswith("loss") else ".2f"
    return f"**{line['ratios'][peer]:{form}}**" + (f" ({least:{form}} to {most:{form}})" if "spread" in line else "")


def _table(lines: Sequence[Result]) -> list[str]:
    columns = [column for column in COLUMNS if any(line.get(column[0]) not in (None, "") for line in lines)]
    peers = list(dict.fromkeys(peer for line in lines for peer in line["ratios"]))
    most = any("most" in line for line in lines)
    heads = [head for _, head, _ in columns] + [f"÷ {peer}" for peer in peers] + (["most"] if most else [])
    rows = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for line in lines:
        cells = [_cell(line, field, form) for field, _, form in columns]
        cells += [_ratio(line, peer) for peer in peers]
        cells += [f"{line['most']:.2f}"] if most else []
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def _cell(line: Result, field: str, form: str) -> str:
    value = line.get(field)
    if value is None or value == "":
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{name} {form.format(each / UNITS[field])}" for name, each in value.items())
    value = value / UNITS[field] if field in UNITS else value
    text = form.format(value)
    return text if "e+" not in text else f"{value:.0f}"  # 17920, not 1.792e+04
