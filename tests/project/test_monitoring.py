"""Grafana's dashboard and the alert rules: what they say, read anywhere; what promtool makes of them, where it is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tools.documented_metrics import documented, off_panels

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = ROOT / "deploy/prometheus"
DASHBOARD = json.loads((ROOT / "deploy/grafana/dashboards/parameter-server.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
COLUMNS = 24
METRIC = re.compile(r"\b(?:ps|grpc_server)_\w+")


def read(name: str) -> Any:
    return yaml.safe_load((PROMETHEUS / name).read_text())


def queries() -> list[str]:
    """All that the dashboard asks Prometheus: for its panels, and for its annotations."""
    asked = [target["expr"] for panel in PANELS for target in panel["targets"]]
    return asked + [annotation["expr"] for annotation in DASHBOARD["annotations"]["list"]]


def rules() -> list[dict[str, Any]]:
    return [rule for group in read("alerts.yml")["groups"] for rule in group["rules"]]


def metrics_in(texts: list[str]) -> set[str]:
    """The metrics that queries name, as docs/metrics.md calls them."""
    names = {name for text in texts for name in METRIC.findall(text) if not name.startswith("grpc_")}
    known = {metric.name for metric in documented()}
    return {name if name in known else re.sub("_(bucket|sum|count)$", "", name) for name in names}


# -- the dashboard ---------------------------------------------------------------------------------------------------


def test_every_documented_metric_is_on_a_panel_or_listed_as_not() -> None:
    known, shown, left_out = {metric.name for metric in documented()}, metrics_in(queries()), off_panels()
    assert shown <= known, "the dashboard shows metrics that exist"
    assert left_out <= known
    assert known - shown == left_out
    assert len(shown) > 40


def test_the_grpc_metrics_of_the_dashboard_are_served() -> None:
    interceptor = (ROOT / "ps_server/rpc/interceptor.py").read_text()
    used = {name for query in queries() for name in METRIC.findall(query) if name.startswith("grpc_")}
    assert used
    assert all(f'"{re.sub("_(bucket|sum|count)$", "", name)}"' in interceptor for name in used)


def test_every_panel_has_a_place_of_its_own_and_says_what_it_shows() -> None:
    taken: Counter[tuple[int, int]] = Counter()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        taken.update(
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        )
    assert max(taken.values()) == 1, "none covers another"
    assert max(x for x, _ in taken) < COLUMNS
    assert len(taken) == COLUMNS * (1 + max(y for _, y in taken)), "and there is no gap"
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        assert len(panel["description"]) > 8, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        for target in panel["targets"]:
            assert target["legendFormat"], panel["title"]
            by = re.search(r"by \(([\w, ]+)\)", target["expr"])
            told = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert told <= set(re.split(", *", by[1]) if by else ()), f"{panel['title']}: the query drops these labels"


def test_units_are_those_of_the_metrics() -> None:
    for panel in PANELS:
        unit = panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            [name, *_] = METRIC.findall(target["expr"])
            rate = "rate(" in target["expr"]
            if re.search(r"_bytes(_total)?$", name):
                assert unit == ("Bps" if rate else "bytes"), panel["title"]
            elif re.search(r"_seconds(_bucket)?$", name):
                assert unit == "s", panel["title"]
            elif name.endswith("_total") and rate and "seconds" not in name:
                assert unit == "cps", panel["title"]


def test_the_row_about_safety_has_colours_and_what_happened_is_marked() -> None:
    begin = next(at for at, panel in enumerate(DASHBOARD["panels"]) if panel["title"] == "Safety")
    end = next(at for at, panel in enumerate(DASHBOARD["panels"]) if at > begin and panel["type"] == "row")
    safety = DASHBOARD["panels"][begin + 1 : end]
    stats = [panel for panel in safety if panel["type"] == "stat"]
    assert len(stats) >= 6
    for panel in stats:
        steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        assert steps[0]["value"] is None, "the colour of everything below the first threshold"
        assert len(steps) > 1
        assert len({step["color"] for step in steps}) == len(steps)
        assert panel["options"]["colorMode"] == "value"
    assert {"Rollbacks", "Shards started again", "Alerts"} <= {it["name"] for it in DASHBOARD["annotations"]["list"]}


# -- the alerts ------------------------------------------------------------------------------------------------------


def test_alerts_are_about_metrics_that_exist() -> None:
    used = metrics_in([rule["expr"] for rule in rules()])
    assert used <= {metric.name for metric in documented()}
    assert len(used) > 12


def test_every_alert_says_what_it_is_about_and_the_docs_list_it() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names) >= 14
    listed = re.findall(r"^\| `(Ps\w+)` \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    assert listed == names, "in the same order"
    for rule in rules():
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}


def test_each_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    cases = [case for test in read("alerts.test.yml")["tests"] for case in test["alert_rule_test"]]
    for holds in (bool, lambda expected: not expected):
        assert {case["alertname"] for case in cases if holds(case["exp_alerts"])} == {rule["alert"] for rule in rules()}


def test_an_alert_fires_a_week_before_a_certificate_ends() -> None:
    [rule] = [rule for rule in rules() if rule["alert"] == "PsCertificateEndsSoon"]
    days, hours, seconds = (int(number) for number in rule["expr"].partition(" < ")[2].split(" * "))
    assert days * hours * seconds == 7 * 86400


# -- promtool, where it is installed ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def promtool() -> Callable[..., None]:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed: Debian has it in the package prometheus")

    def run(*words: str | Path) -> None:
        done = subprocess.run([found, *words], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr

    return run


def test_promtool_accepts_the_configuration(promtool: Callable[..., None]) -> None:
    promtool("check", "config", "--syntax-only", PROMETHEUS / "prometheus.yml")


def test_promtool_accepts_the_alerts(promtool: Callable[..., None]) -> None:
    promtool("check", "rules", PROMETHEUS / "alerts.yml")


def test_each_alert_fires_when_it_should_and_not_otherwise(promtool: Callable[..., None]) -> None:
    promtool("test", "rules", PROMETHEUS / "alerts.test.yml")


def test_promtool_parses_every_query_of_the_dashboard(promtool: Callable[..., None], tmp_path: Path) -> None:
    variables = {"$__rate_interval": "1m", "$__range": "15m", "$job": ".*"}
    recorded = []
    for number, query in enumerate(queries()):
        for name, value in variables.items():
            query = query.replace(name, value)
        recorded.append({"record": f"panel:query:{number}", "expr": query})
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
    promtool("check", "rules", file)
