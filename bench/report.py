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
    ("shards", "shards", "{}"),
    ("ms", "ms", "{:.4g}"),
    ("samples_per_second", "samples/s", "{:.0f}"),
    ("gigabytes_per_second", "GB/s", "{}"),
    ("moved_bytes", "MB on a worker's link, a step", "{:.1f}"),
    ("sent_bytes", "MB a worker sends", "{:.1f}"),
    ("received_bytes", "MB a worker receives", "{:.1f}"),
    ("predicted_bytes", "MB predicted, of a ring each way", "{:.1f}"),
    ("cpu_seconds_per_gigabyte", "CPU, s a GB", "{:.3f}"),
    ("shards_cpu_ms", "CPU of the shards, ms a step", "{:.2f}"),
    ("loss", "last loss", "{:.3f}"),
    ("peak_bytes", "peak, MiB", "{:.0f}"),
    ("imports_bytes", "imports, MiB", "{:.0f}"),
    ("shared_bytes", "shared, MiB", "{:.0f}"),
    ("held_bytes", "weights + state, MiB", "{:.0f}"),
    ("compute", "compute", "{}"),
    ("fault_count", "faults", "{}"),
    ("pair_count", "pairs of kinds that overlapped", "{}"),
    ("lost_steps", "steps lost with shards, and counted", "{}"),
    ("violations", "violations", "{}"),
    ("not_measured", "not measured, because", "{}"),
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
    """Writes FOLDER.md from FOLDER/*.jsonl, a section a file in the order of the benchmarks; then those without."""
    order = list(modules)
    files = {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.glob("*.jsonl")}
    sections = sorted(
        (lines for lines in files.items() if lines[1]), key=lambda f: (order.index(f[1][0]["bench"]), f[0])
    )
    page = [
        "# Benchmarks",
        "",
        "`python -m bench report` writes this page from the results in [benchmarks/](benchmarks). `make bench` runs a",
        "short form of all benchmarks and writes it anew. Every process computes with one thread. A ratio compares",
        "systems that take turns within one run; absolute times are those of the machine named. Of several runs, a",
        "figure is the median, and the smallest and the largest ratio stand beside it.",
    ]
    for stem, lines in sections:
        page += ["", *_section(folder, stem, lines, modules[lines[0]["bench"]].__doc__ or "")]
    measured = {lines[0]["bench"] for _, lines in sections}
    for name in order:
        if name not in measured:
            page += ["", *_without_results(name, modules[name].__doc__ or "")]
    folder.with_suffix(".md").write_text("\n".join(page) + "\n")


def _section(folder: Path, stem: str, lines: Sequence[Result], text: str) -> list[str]:
    lines = merged(lines)
    first = lines[0]
    used = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    size = first["bytes"]
    found = [
        f"## {stem}",
        "",
        *text.strip().splitlines(),
        "",
        "```console",
        f"$ {first['command']}",
        "```",
        "",
        f"Weights: {size / MIB:.4g} MiB. Machine: {first['machine']}; {used}.{_runs(first)}",
        "",
        *_table(lines),
    ]
    if (folder / f"{stem}.png").exists():
        found += ["", f"![{stem}]({folder.name}/{stem}.png)"]
    return found


def _without_results(name: str, text: str) -> list[str]:
    return [
        f"## {name}",
        "",
        *text.strip().splitlines(),
        "",
        "```console",
        f"$ python -m bench {name}",
        "```",
        "",
        "No results of it are in benchmarks/ yet.",
    ]


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
    return form.format(value / UNITS[field] if field in UNITS else value)
