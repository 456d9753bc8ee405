"""The engine's side of the protocol: clients that never make an engine wait."""

from connector.client.jobs import (
    ClientHealth,
    ClientOptions,
    ClientState,
    LoadItem,
    LoadJob,
    LoadResult,
    SaveItem,
    SaveJob,
    SaveResult,
)
from connector.client.scheduler import PendingLookup, SchedulerClient
from connector.client.worker import WorkerClient

__all__ = [
    "ClientHealth",
    "ClientOptions",
    "ClientState",
    "LoadItem",
    "LoadJob",
    "LoadResult",
    "PendingLookup",
    "SaveItem",
    "SaveJob",
    "SaveResult",
    "SchedulerClient",
    "WorkerClient",
]
