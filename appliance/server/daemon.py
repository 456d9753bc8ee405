"""The daemon's life: checks in an order in which a failed one has damaged nothing, then service, then an ordered stop."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import structlog
import zmq

from appliance.catalog.account_memory import AccountMemory
from appliance.catalog.database import open_for_daemon
from appliance.catalog.health import CatalogState
from appliance.catalog.recovery import ControlState, load_control_state
from appliance.catalog.writer import CatalogWriter
from appliance.check.runner import CheckRunner
from appliance.errors import (
    CatalogUnavailable,
    CatalogUnreadable,
    InsecureBind,
    InvalidSettings,
    PagewardenError,
    PortInUse,
)
from appliance.l1.eviction import policy_named
from appliance.l1.opening import Opened, open_arena
from appliance.protocol.arena_layout import SegmentLayout
from appliance.protocol.client import endpoint_of
from appliance.protocol.liveness import forget, is_alive
from appliance.protocol.status import CatalogStatus, Gate
from appliance.protocol.wire import ID_BYTES
from appliance.run_dir import secret_path, write_secret
from appliance.server import membership
from appliance.server.background import BackgroundLoop, Mailbox
from appliance.server.bulk import BulkServer, bind_bulk
from appliance.server.core import Core, Phase, build_core
from appliance.server.dispatch import Dispatcher, Waiting
from appliance.server.first_start import ensure_admin, show_first_password
from appliance.server.loop import Loop, bind_control
from appliance.server.policy import apply_changed
from appliance.server.population import Populator
from appliance.server.projection import Projection
from appliance.server.restart import clears_of, keep_recency, take_back
from appliance.server.room import check_room
from appliance.server.spare import spare_memory
from appliance.server.web_child import WebChild
from appliance.settings import LOOPBACK, Settings
from appliance.tickets import WriteTicket
from appliance.ttl import TTL_NAMES, Ttls

_log = structlog.get_logger(__name__)

CATALOG_STOP_SECONDS = 5.0
LIVENESS_SECONDS = 1.0
MIN_EXTENTS = 16


class Daemon:
    """One daemon. ``run`` returns the exit status after an orderly stop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._boot = secrets.token_bytes(ID_BYTES)
        self._mailbox = Mailbox()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stop_requested = threading.Event()

    def run(self) -> int:
        """Start, serve until a signal, stop.

        Raises:
            StartupError: with the remedy, before anything was damaged.
        """
        _check_settings(self._settings)
        os.umask(0o077)  # arena, catalog and sockets are this user's alone
        router, port = self._bind()
        bulk_router, bulk_port = self._bind_bulk()
        self._first_password = _open_catalog(self._settings)
        control = load_control_state(self._settings.catalog)
        self._secret_path = secret_path(self._settings.run_dir, port)
        admin_secret = write_secret(self._secret_path)
        shape = SegmentLayout(
            self._settings.l1_bytes // self._settings.extent_bytes, self._settings.extent_bytes
        )
        check_room(self._settings.arena_dir, shape)
        began = time.monotonic()
        opened = open_arena(
            self._settings.arena_dir,
            size_bytes=self._settings.l1_bytes,
            extent_bytes=self._settings.extent_bytes,
            boot=self._boot,
            clears=clears_of(control),
            spare_bytes=spare_memory(self._settings.arena_dir),
        )
        self._assemble(opened, control, router, admin_secret)
        self._restart = take_back(self._core, opened, began)
        self._add_bulk(bulk_router, bulk_port)
        self._namespaces = opened.namespaces
        self._serve(port)
        return 0

    def _bind(self) -> tuple[zmq.Socket[bytes], int]:
        settings = self._settings
        try:
            router = bind_control(self._context, _endpoint(settings.host, settings.port))
        except zmq.ZMQError as error:
            raise PortInUse(
                f"The address {settings.host}:{settings.port} cannot be used: {error.strerror or error}.",
                remedy="Stop the process that listens there, or choose another with --host and --port.",
            ) from error
        if not settings.no_web and settings.http_port:
            _check_http(settings)
        return router, _port_of(router)

    def _bind_bulk(self) -> tuple[zmq.Socket[bytes], int]:
        """The bulk socket has a context, and so an IO thread, of its own: page bytes delay no control message."""
        settings = self._settings
        self._bulk_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            router = bind_bulk(self._bulk_context, _endpoint(settings.host, settings.bulk_port))
        except zmq.ZMQError as error:
            raise PortInUse(
                f"The address {settings.host}:{settings.bulk_port} cannot be used: {error.strerror or error}.",
                remedy="Stop the process that listens there, or choose another with --bulk-port.",
            ) from error
        return router, _port_of(router)

    def _assemble(
        self, opened: Opened, control: ControlState, router: zmq.Socket[bytes], admin_secret: str
    ) -> None:
        settings = self._settings
        ttls = _ttls(settings, control)
        opened.arena.clear_epoch_floor = control.highest_epoch
        self._catalog = CatalogWriter(settings.catalog, on_durable=self._on_durable)
        self._core = build_core(settings, self._boot, opened, self._catalog.submit, ttls)
        self._core.accounts = AccountMemory(control.users, control.tokens, control.logins)
        self._core.admin_secret = admin_secret
        apply_changed(self._core, control.settings)
        checks = CheckRunner(self._core, self._mailbox.post, settings.catalog, self._catalog_queue)
        self._core.ask_check = checks.ask
        self._dispatcher = Dispatcher(self._core, self._health, self._require_catalog)
        self._loop = Loop(self._core, self._dispatcher, router, self._mailbox, self._submit_control)
        self._router = router
        self._populator = Populator(opened.arena.spaces, settings.l1_init_bytes, self._mailbox)
        self._projection = Projection(self._core, opened.taken, self._mailbox, self._catalog_queue)
        self._loops = [
            BackgroundLoop("populator", self._populator.tick),
            BackgroundLoop("projection", self._projection.tick),
            BackgroundLoop("liveness", self._probe_liveness),
            BackgroundLoop("phases", self._watch_phases),
        ]

    def _add_bulk(self, router: zmq.Socket[bytes], port: int) -> None:
        self._core.bulk_port = port
        self._bulk = BulkServer(router, port, self._boot, self._core.tickets, self._let_go)

    def _let_go(self, ticket: WriteTicket) -> None:
        """On the bulk thread: a write has ended whose reservation ended before it."""
        self._mailbox.post(_freed(self._core, ticket))

    # --- service ------------------------------------------------------------------------------------------------

    def _serve(self, port: int) -> None:
        settings = self._settings
        _log.info(
            "daemon started",
            boot=self._boot.hex(),
            endpoint=endpoint_of(settings.host, port),
            bulk_endpoint=endpoint_of(settings.host, self._bulk.port),
            arena=str(settings.arena_dir),
            l1_bytes=settings.l1_bytes,
            catalog=str(settings.catalog),
            start=self._restart.mode,
            reason=self._restart.reason,
            objects=self._restart.objects,
            limbo_objects=self._restart.limbo_objects,
        )
        self._catalog.start()
        self._core.history.forget_objects(None)
        self._catalog.submit(self._restart.event(self._boot, self._core.started_unix))
        self._core.move_to(Phase.POPULATING)
        thread = threading.Thread(target=self._loop.run, name="loop", daemon=True)
        thread.start()
        self._bulk.start()
        for loop in self._loops:
            loop.start()
        web = None if settings.no_web else WebChild(settings, port)
        if self._first_password is not None:
            show_first_password(self._first_password, settings)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop_requested.set())
        while not self._stop_requested.wait(1.0):
            if web is not None:
                web.watch()
        self._stop(thread, web)

    def _stop(self, thread: threading.Thread, web: WebChild | None) -> None:
        """Refuse new holds, wait (bounded) for copies under way, flush, set the clean flag last."""
        _log.info("stopping", drain_seconds=self._settings.drain_seconds)
        drained = threading.Event()
        deadline = time.monotonic() + self._settings.drain_seconds
        self._mailbox.post(lambda: self._core.move_to(Phase.DRAINING))
        while not drained.is_set() and time.monotonic() < deadline:
            self._mailbox.post(lambda: drained.set() if not self._under_way() else None)
            drained.wait(0.05)
        bulk_ended = self._bulk.stop(2.0)
        for loop in self._loops:
            loop.stop(2.0)
        if web is not None:
            web.stop()
        self._mailbox.post(self._loop.stop)
        thread.join(5.0)
        flushed = self._catalog.stop(CATALOG_STOP_SECONDS)
        self._core.move_to(Phase.STOPPED)
        self._router.close(linger=0)
        self._context.term()
        if bulk_ended:
            self._bulk_context.term()
        self._secret_path.unlink(missing_ok=True)
        orderly = drained.is_set() and not thread.is_alive() and bulk_ended
        if orderly:
            keep_recency(self._core)
        # A namespace that nothing describes cannot be taken back, so the next start must not expect every object.
        self._core.arena.close(clean=orderly and not self._namespaces.undescribed)
        _log.info("stopped", drained=drained.is_set(), history_flushed=flushed)

    def _under_way(self) -> bool:
        """Whether a located copy or a reservation is not finished; leases of queued requests do not hold the stop."""
        return bool(self._core.reservations.live or self._core.located)

    # --- background turns -----------------------------------------------------------------------------------------

    def _probe_liveness(self) -> float:
        directory = self._core.arena.directory
        for attach_id in self._loop.watched_attach_ids:
            if not is_alive(directory, attach_id):
                self._mailbox.post(_died(self._core, attach_id))
                forget(directory, attach_id)
        return LIVENESS_SECONDS

    def _watch_phases(self) -> float:
        """READY follows population; a catalog whose thread hangs must still refuse its waiting changes."""
        self._catalog.refuse_overdue()
        if self._core.phase is Phase.POPULATING and self._populator.progress.initial_done:
            self._mailbox.post(self._become_ready)
        return 0.1

    def _become_ready(self) -> None:
        if self._core.phase is Phase.POPULATING:
            self._core.move_to(Phase.READY)
            _log.info("ready", populated_bytes=self._populator.progress.done_bytes)

    # --- the catalog ------------------------------------------------------------------------------------------------

    def _submit_control(self, token: int, waiting: Waiting) -> None:
        self._catalog.submit_control(token, waiting.answer.row)

    def _on_durable(self, token: int, error: PagewardenError | None) -> None:
        self._mailbox.post(lambda: self._loop.durable(token, error))

    def _catalog_queue(self) -> int:
        return self._catalog.health().queued

    def _require_catalog(self) -> None:
        health = self._catalog.health()
        if health.state is CatalogState.DOWN:
            raise CatalogUnavailable(
                health.reason, remedy="Nothing was changed; repair the catalog and try again."
            )

    # --- health -------------------------------------------------------------------------------------------------------

    def _health(self) -> dict[str, Any]:
        catalog = self._catalog.health()
        progress = self._populator.progress
        draining = self._core.phase in (Phase.DRAINING, Phase.STOPPED)
        gates = [
            Gate(name="arena", open=True, reason=f"The arena in {self._core.arena.directory} is open."),
            Gate(name="population", open=progress.initial_done, reason=progress.sentence),
            Gate(
                name="accepting",
                open=not draining,
                reason="The daemon is stopping." if draining else "New leases and reservations are granted.",
            ),
            Gate(
                name="catalog",
                open=True,
                reason=f"{catalog.reason or 'History is written.'} The cache is served whatever its state is.",
            ),
        ]
        return {
            "gates": gates,
            "catalog": CatalogStatus(
                state=catalog.state.value,
                reason=catalog.reason,
                path=str(self._settings.catalog),
                queued=catalog.queued,
                written=catalog.written,
                dropped=catalog.dropped,
                last_commit_age_seconds=catalog.last_commit_age_seconds,
            ),
            "inline": self._bulk.status(),
            "restart": self._restart.status(),
            "loops": [
                self._loop.pulse.status(),
                self._bulk.pulse.status(),
                *(loop.pulse.status() for loop in self._loops),
            ],
        }


def _died(core: Core, attach_id: int) -> Callable[[], None]:
    return lambda: membership.process_died(core, attach_id)


def _freed(core: Core, ticket: WriteTicket) -> Callable[[], None]:
    def free() -> None:
        core.reservations.let_go(ticket.attach_id, ticket.reservation_id)

    return free


def _endpoint(host: str, port: int) -> str:
    """Where to bind; port 0 means any."""
    if port:
        return endpoint_of(host, port)
    return f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*"


def _port_of(router: zmq.Socket[bytes]) -> int:
    endpoint = router.getsockopt(zmq.LAST_ENDPOINT)
    text = endpoint.decode() if isinstance(endpoint, bytes) else str(endpoint)
    return int(text.rsplit(":", 1)[1].rstrip("\0"))


def _check_settings(settings: Settings) -> None:
    policy_named(settings.eviction_policy)
    for name, host in (("host", settings.host), ("http_host", settings.http_host)):
        if host not in LOOPBACK and not settings.insecure:
            raise InsecureBind(
                f"The setting '{name}' is {host}, which other hosts can reach, and connections are not authenticated.",
                remedy="Use a loopback address, or say --insecure if the network is trusted.",
            )
    if settings.l1_bytes < MIN_EXTENTS * settings.extent_bytes:
        raise InvalidSettings(
            f"The setting 'l1_size_gb' is {settings.l1_size_gb:g}, less than {MIN_EXTENTS} extents of "
            f"{settings.extent_kib} KiB.",
            remedy="Raise --l1-size-gb or lower --extent-kib.",
        )


def _check_http(settings: Settings) -> None:
    """Fail early if the dashboard's port is taken; the web process binds it itself."""
    family = socket.AF_INET6 if ":" in settings.http_host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.http_host, settings.http_port))
        except OSError as error:
            raise PortInUse(
                f"The dashboard's address {settings.http_host}:{settings.http_port} cannot be used: {error.strerror}.",
                remedy="Stop the process that listens there, choose another with --http-port, or say --no-web.",
            ) from error


def _open_catalog(settings: Settings) -> str | None:
    """Open and migrate the catalog before the arena is touched; the first admin's password where one was made up.

    Raises:
        CatalogUnreadable: with the remedy.
    """
    try:
        open_for_daemon(settings.catalog).dispose()
    except CatalogUnavailable as error:
        raise CatalogUnreadable(error.message, remedy=error.remedy, **error.details) from error
    return ensure_admin(settings)


def _ttls(settings: Settings, control: ControlState) -> Ttls:
    """TTLs as set, with the changes that admins made at run time on top."""
    ttls = Ttls(settings.l1_read_ttl_seconds, settings.l1_write_ttl_seconds, settings.session_ttl_seconds)
    for changed in control.settings:
        if changed.name in TTL_NAMES and isinstance(changed.value, (int, float)):
            ttls.set(changed.name, float(changed.value), changed.scope)
    return ttls
