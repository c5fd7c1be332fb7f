"""Gauges of the exposure of a server process: plaintext, missing tokens, calls in flight. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ps_runtime.metrics import Gauges, Sample
from ps_server.rpc.call_limits import CallLimits


def security_gauges(call_limits: CallLimits, exposed: bool, encrypted: bool, asks: bool) -> Gauges[dict[str, int]]:
    """Returns the gauges of this process's exposure, and of its calls in flight.

    exposed:   plaintext is served beyond this machine
    encrypted: connections use TLS
    asks:      callers must identify themselves
    """

    def flag(value: bool) -> Callable[[dict[str, int]], Iterable[Sample]]:
        return lambda _: [((), float(value))]

    def count(name: str) -> Callable[[dict[str, int]], Iterable[Sample]]:
        return lambda statistics: [((), statistics[name])]

    return Gauges(
        call_limits.statistics,
        [
            ("ps_insecure", "1: plaintext is served beyond this machine, as --insecure says.", (), flag(exposed)),
            ("ps_tls", "1: connections are encrypted.", (), flag(encrypted)),
            ("ps_identity_required", "1: callers must show a token or a certificate.", (), flag(asks)),
            ("ps_calls_in_flight", "Calls in flight.", (), count("calls")),
            ("ps_callers", "Callers with calls in flight.", (), count("callers")),
            ("ps_slow_peer_waits", "Waits for a peer to send or to read.", (), count("waits")),
        ],
    )
