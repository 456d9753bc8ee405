"""Asking whether a daemon runs."""

from __future__ import annotations

from appliance.doctor.network import why_no_connection
from appliance.errors import PagewardenError
from appliance.protocol.client import RequestClient, endpoint_of
from appliance.protocol.status import DaemonStatus

TIMEOUT_SECONDS = 2.0


def running_status(host: str, port: int) -> DaemonStatus | None:
    """The status of the daemon at an address; ``None`` if none answers."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    if why_no_connection(reachable, port, timeout_seconds=TIMEOUT_SECONDS):
        return None  # at once, where the port is closed
    with RequestClient(
        endpoint_of(reachable, port), client_name="pagewarden-doctor", timeout_seconds=TIMEOUT_SECONDS
    ) as client:
        try:
            return client.call("status", {}, DaemonStatus)
        except PagewardenError:
            return None
