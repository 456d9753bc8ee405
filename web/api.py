"""The REST API: the status document, and the answers that probes and Prometheus read."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from pydantic import BaseModel, ConfigDict

from appliance.access import Permission
from appliance.errors import DaemonUnreachable, PagewardenError, all_errors
from appliance.protocol.status import DaemonStatus, Gate
from web.format import format_duration
from web.guard import GuardedRoute, public, requires
from web.metrics import StatusCollector
from web.poller import Snapshot
from web.problems import problem_responses
from web.state import WebState, state_of

router = APIRouter(route_class=GuardedRoute)

DAEMON_GATE = "daemon"
"""The readiness gate of the web process itself: the daemon answers with its status."""


class WebPart(BaseModel):
    """What the web process adds to the daemon's document.

    ``data_age_seconds`` is the age of the rest of the document; ``unreachable_seconds`` says for how long the daemon
    has not answered, ``null`` while it does; ``last_error`` describes the last failure, also after it has passed.
    """

    version: str
    data_age_seconds: float
    daemon_reachable: bool
    unreachable_seconds: float | None
    last_error: str
    last_error_code: str
    polls: int
    poll_errors: int


class StatusDocument(DaemonStatus):
    """The daemon's account of itself, as last read, and how it was read."""

    model_config = ConfigDict(ser_json_bytes="base64", ser_json_inf_nan="null")

    web: WebPart


class HealthDocument(BaseModel):
    """Whether the daemon's loop answered a ping; ``code`` and ``reason`` say why not."""

    healthy: bool
    code: str = ""
    reason: str = ""
    phase: str = ""
    daemon_uptime_seconds: float | None = None
    ping_seconds: float


class ReadyDocument(BaseModel):
    """Whether every gate is open, and each gate with its reason."""

    ready: bool
    gates: list[Gate]


@router.get(
    "/api/v1/status",
    response_model=StatusDocument,
    responses=problem_responses(401, 403, 503),
    tags=["status"],
    operation_id="getStatus",
)
@requires(Permission.STATUS_READ)
async def get_status(request: Request) -> Response:
    """Everything the daemon says of itself at one moment.

    The document is the last one that was read: at most a few seconds old while the daemon answers, and marked with
    its age. Only a daemon that never answered is an error.
    """
    state = state_of(request)
    snapshot = await state.poller.recent()
    if snapshot.status is None:
        raise _no_status(state, snapshot)
    web = WebPart(
        version=state.version,
        data_age_seconds=round(snapshot.age_seconds or 0.0, 3),
        daemon_reachable=snapshot.reachable,
        unreachable_seconds=None if snapshot.failing_seconds is None else round(snapshot.failing_seconds, 3),
        last_error=snapshot.error,
        last_error_code=snapshot.error_code,
        polls=snapshot.polls,
        poll_errors=snapshot.errors,
    )
    document = StatusDocument.model_construct(**dict(snapshot.status), web=web)
    return Response(document.model_dump_json(), media_type="application/json")


@router.get(
    "/healthz",
    response_model=HealthDocument,
    responses={503: {"model": HealthDocument, "description": "The daemon's loop does not answer"}},
    tags=["probes"],
    operation_id="getHealth",
)
@public(probe=True)
async def get_health(request: Request) -> JSONResponse:
    """Whether the daemon's loop answers a ping within 0.7 s. Reads neither the status nor the catalog."""
    result = await state_of(request).probe.ping()
    if result.ping is None:
        document = HealthDocument(
            healthy=False, code=result.code, reason=result.reason, ping_seconds=round(result.seconds, 6)
        )
        return JSONResponse(document.model_dump(), 503)
    return JSONResponse(
        HealthDocument(
            healthy=True,
            phase=result.ping.phase,
            daemon_uptime_seconds=result.ping.uptime_seconds,
            ping_seconds=round(result.seconds, 6),
        ).model_dump()
    )


_READY_CONTENT: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}


@router.get(
    "/readyz",
    response_model=ReadyDocument,
    responses={
        200: {"description": "Every gate is open", "content": _READY_CONTENT},
        503: {"model": ReadyDocument, "description": "A gate is closed", "content": _READY_CONTENT},
    },
    tags=["probes"],
    operation_id="getReadiness",
)
@public(probe=True)
async def get_readiness(request: Request) -> Response:
    """Each condition of readiness with its reason, as JSON or, where ``Accept`` prefers it, as plain text."""
    snapshot = await state_of(request).poller.recent()
    gates = readiness_gates(snapshot)
    document = ReadyDocument(ready=all(gate.open for gate in gates), gates=gates)
    status = 200 if document.ready else 503
    if _prefers_text(request.headers.get("accept", "")):
        lines = [f"[{'+' if gate.open else '-'}] {gate.name}: {gate.reason}" for gate in gates]
        lines.append("ready" if document.ready else "not ready")
        return PlainTextResponse("\n".join(lines) + "\n", status)
    return JSONResponse(document.model_dump(), status)


@router.get(
    "/metrics",
    response_class=PlainTextResponse,
    tags=["metrics"],
    operation_id="getMetrics",
)
@public(probe=True)
async def get_metrics(request: Request) -> Response:
    """The metrics in Prometheus's text format; docs/metrics.md describes each."""
    snapshot = await state_of(request).poller.recent()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(snapshot))
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(registry), headers={"Content-Type": content_type})


def readiness_gates(snapshot: Snapshot) -> list[Gate]:
    """The gates of the daemon, behind the one that says whether it answers; closed ones are as last known."""
    status = snapshot.status
    if status is None:
        reason = snapshot.error or "The daemon has not answered yet."
        return [Gate(name=DAEMON_GATE, open=False, reason=reason)]
    if not snapshot.reachable:
        silent = format_duration(snapshot.failing_seconds)
        reason = f"The daemon has not answered for {silent}. {snapshot.error}"
        return [Gate(name=DAEMON_GATE, open=False, reason=reason), *status.gates]
    gates = [Gate(name=DAEMON_GATE, open=True, reason="The daemon answers."), *status.gates]
    if not status.ready and all(gate.open for gate in gates):
        gates.append(Gate(name="phase", open=False, reason=f"The daemon is {status.phase}."))
    return gates


def _no_status(state: WebState, snapshot: Snapshot) -> PagewardenError:
    if snapshot.error_code in ("", DaemonUnreachable.code):
        return DaemonUnreachable(
            f"The daemon at {state.settings.endpoint} has not answered yet.",
            remedy="Check that `pagewarden server` runs and that host and port are right.",
            endpoint=state.settings.endpoint,
        )
    return all_errors().get(snapshot.error_code, PagewardenError)(snapshot.error)


def _prefers_text(accept: str) -> bool:
    """Whether plain text stands before JSON in the client's preferences; JSON without any."""
    weights = {"text/plain": 0.0, "application/json": 0.0}
    for item in accept.split(","):
        media, *parameters = (part.strip().lower() for part in item.split(";"))
        quality = next((p[2:] for p in parameters if p.startswith("q=")), "1")
        if media in weights:
            try:
                weights[media] = float(quality)
            except ValueError:
                continue
    return weights["text/plain"] > weights["application/json"]
