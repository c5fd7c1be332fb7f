"""Looks for known vulnerabilities in what is locked: `make audit`. Exits 1 if there are any.

Where no database of advisories can be reached, it says so and exits 0: a build without the internet is no worse for it.
"""

from __future__ import annotations

import json
import subprocess
import sys

# What pip-audit writes when it cannot ask, and nothing else does.
UNREACHABLE = ("ConnectionError", "Could not connect", "Max retries exceeded", "NameResolutionError", "ServiceError")
AUDIT = ("-m", "pip_audit", "--disable-pip", "--no-deps", "--progress-spinner=off", "--format=json", "--requirement")


def findings(report: str) -> list[str]:
    """One line for each vulnerability that a report of pip-audit names."""
    dependencies = json.loads(report)["dependencies"]
    return [
        f"{each['name']} {each['version']}: {known['id']}, mended in {', '.join(known['fix_versions']) or 'no version'}"
        for each in dependencies
        for known in each.get("vulns", [])
    ]


def audit(lock: str) -> int:
    """Prints what is known of the versions in a lock; returns the exit code."""
    done = subprocess.run([sys.executable, *AUDIT, lock], capture_output=True, text=True, check=False)
    if done.stdout.lstrip().startswith("{"):
        known = findings(done.stdout)
        print("\n".join(known) or f"{lock}: no known vulnerabilities", flush=True)
        return 1 if known else 0
    if any(word in done.stderr for word in UNREACHABLE):
        print(f"{lock}: no advisory database is reachable, so nothing is known of it", flush=True)
        return 0
    print(f"{lock}: pip-audit failed: {done.stderr.strip()[-2000:]}", flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(max(audit(lock) for lock in sys.argv[1:]))
