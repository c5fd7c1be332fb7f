"""How tests of claims over many examples run: with the same examples every time, however slow the machine.

conftest.py imports this. Runs of pytest that leave that out name it as a plugin: `-p tests.tools.claims`.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("claims", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("claims")
