"""The alerts as Prometheus' operator takes them, written from those that Prometheus itself reads.

python -m tests.tools.prometheus_rule     # writes the file anew
"""

from __future__ import annotations

import textwrap

from tests.tools.launching import ROOT

SOURCE = ROOT / "deploy" / "prometheus" / "alerts.yml"
TARGET = ROOT / "deploy" / "kubernetes" / "components" / "monitoring" / "alerts.yaml"
_HEAD = """# Those of deploy/prometheus/alerts.yml: make alerts
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata: {name: ps-torch}
spec:
"""


def rule() -> str:
    """The file."""
    return _HEAD + textwrap.indent(SOURCE.read_text(), "  ")


if __name__ == "__main__":
    TARGET.write_text(rule())
