"""What the clients are given and what they give back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from appliance import __version__
from appliance.protocol import DEFAULT_PORT


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Where the daemon is and how long it may take.

    ``arena_dir`` overrides the directory that the daemon names, for a container that mounts it elsewhere. ``transport`` is
    ``auto``, ``shared`` or ``inline``, see :class:`connector.client.attachment.Attachment`.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    engine_id: str = ""
    arena_dir: str | None = None
    transport: str = "auto"
    lookup_timeout_seconds: float = 0.5
    load_timeout_seconds: float = 30.0
    save_timeout_seconds: float = 30.0
    client_name: str = f"pagewarden-connector/{__version__}"


class ClientState(StrEnum):
    """Where a client stands with the daemon; see :class:`connector.client.link.Link` for the transitions."""

    IDLE = "idle"
    CONNECTING = "connecting"
    JOINING = "joining"
    JOINED = "joined"
    REFUSED = "refused"
    STOPPED = "stopped"
    FORKED = "forked"


@dataclass(frozen=True, slots=True)
class ClientHealth:
    """The state with its reason in a sentence, and the boot of the daemon that was heard last.

    A worker also says how its page bytes travel (``shared`` or ``inline``, empty before it attached), and why so.
    """

    state: ClientState
    reason: str
    boot: bytes
    transport: str = ""
    transport_reason: str = ""


@dataclass(frozen=True, slots=True)
class SaveItem:
    """One object to store: the manager blocks whose pages are its bytes, in order."""

    group: int
    chunk: int
    key: bytes
    parent: bytes
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Objects to store together. ``ready``, called on the copy thread, waits until their bytes are computed."""

    job_id: int
    items: tuple[SaveItem, ...]
    salt: bytes = b""
    ready: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class SaveResult:
    """What became of a save. ``skipped`` were stored already, are being stored, or are another replica's turn."""

    job_id: int
    stored: int
    skipped: int
    failed: int
    bytes_stored: int


@dataclass(frozen=True, slots=True)
class LoadItem:
    """One object to load and the manager blocks it goes to."""

    group: int
    chunk: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadJob:
    """One request's load under a lease; ``keys`` are those of chunks ``0 .. hit_chunks - 1``.

    ``ready``, called on the copy thread, waits until nothing that was computed before uses the blocks any more.
    """

    request_id: str
    lease: int
    hit_chunks: int
    keys: tuple[bytes, ...]
    items: tuple[LoadItem, ...]
    ready: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The one report of a load. ``failed_chunks`` must not be offered to this request again."""

    request_id: str
    ok: bool
    failed_chunks: tuple[int, ...]
    reason: str
    bytes_loaded: int
