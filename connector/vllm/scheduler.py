"""The scheduler's half of the connector: lookups, loads, snapshots and saves, one request at a time.

Everything here runs on vLLM's scheduling thread and never waits: a lookup that has no answer yet makes vLLM ask again,
and the client turns a slow daemon into a miss.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.geometry import GroupKind, ObjectGroup, last_usable_chunk
from connector.client import ClientState, LoadJob
from connector.vllm.figures import Tally
from connector.vllm.identity import IdentityReader, salt_label
from connector.vllm.ledger import SaveLedger
from connector.vllm.orders import Report, StepOrders
from connector.vllm.plans import BlockTables, UnusableTable, load_items
from connector.vllm.requests import Event, Phase, TrackedRequest, UnexpectedEvent
from connector.vllm.saves import SaveCollector
from connector.vllm.snapshots import aim, plan_snapshots

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
    from vllm.v1.request import Request

    from connector.client import SchedulerClient
    from connector.vllm.options import ConnectorOptions

logger = logging.getLogger("vllm.pagewarden")

HOPELESS = frozenset({ClientState.REFUSED, ClientState.STOPPED, ClientState.FORKED})
"""States in which no registration will settle soon."""

IDLE_STEP_SECONDS = 0.0005
"""How long a step that computes nothing rests; vLLM's own engine loop rests twice as long."""

MAX_FAILED_LOADS = 3
"""A request whose loads failed this often is computed without further lookups."""


@dataclass
class SchedulerCounters:
    """What became of requests, cumulative."""

    lookups: int = 0
    hits: int = 0
    loads_failed: int = 0
    unexpected_events: int = 0


class SchedulerSide:
    """Follows every request from its lookup to its end."""

    def __init__(
        self,
        client: SchedulerClient,
        groups: Sequence[ObjectGroup],
        options: ConnectorOptions,
        world_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._groups = tuple(groups)
        self._recurrent = frozenset(group.index for group in groups if group.kind is GroupKind.RECURRENT)
        self._options = options
        self._clock = clock
        self._settle_deadline: float | None = None
        self._identities = IdentityReader(options.salt)
        self._ledger = SaveLedger(world_size)
        self._saves = SaveCollector(
            client, self._groups, self._ledger, store_generated=options.store_generated
        )
        self._requests: dict[str, TrackedRequest] = {}
        self._looking: set[str] = set()
        self._loads: list[LoadJob] = []
        self._broken_loads: list[str] = []
        self.counters = SchedulerCounters()
        self.tally = Tally()

    # --- lookups --------------------------------------------------------------------------------------------------

    def matched_tokens(self, request: Request, local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond `local_tokens` can be loaded; (None, False) while the daemon has not answered."""
        tracked = self._track(request)
        if tracked.phase in (Phase.COMPUTING, Phase.ABANDONED):
            # vLLM started over without a step in between, as it does when its cache is reset under running requests.
            self._preempted(tracked)
        tracked.local_tokens = local_tokens
        if tracked.phase is Phase.NEW and not self._ask(tracked):
            return None, False
        if tracked.phase is Phase.LOOKING and not self._poll(tracked):
            return None, False
        return self._offer(tracked)

    def _track(self, request: Request) -> TrackedRequest:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            identity = None if request.resumable else self._identities.identity(request)
            label = salt_label(identity.salt) if identity is not None else b""
            tracked = TrackedRequest(request, identity, label)
            self._requests[request.request_id] = tracked
        return tracked

    def _ask(self, tracked: TrackedRequest) -> bool:
        """Start the lookup; False while the engine's registration has not settled."""
        request = tracked.request
        tracked.answer = None
        chunk_tokens = self._client.chunk_tokens
        if chunk_tokens is None and self._settling():
            return False
        keys: list[bytes] = []
        if chunk_tokens is not None and tracked.identity is not None:
            keys = tracked.keys_for(chunk_tokens, last_usable_chunk(request.num_tokens, chunk_tokens))
        exhausted = tracked.failed_loads >= MAX_FAILED_LOADS
        if not keys or exhausted or request.skip_reading_prefix_cache:
            self._move(tracked, Event.NOT_SERVED)
            return True
        tracked.pending = self._client.lookup(
            tracked.request_id,
            keys,
            prompt_tokens=request.num_tokens,
            local_tokens=tracked.local_tokens,
            refused_chunks=sorted(tracked.refused_chunks),
        )
        self.counters.lookups += 1
        self.tally.add(lookups=1)
        self._looking.add(tracked.request_id)
        self._move(tracked, Event.ASKED)
        return True

    def _settling(self) -> bool:
        """Whether to wait for the registration: only at the engine's start, and only for a bounded time."""
        if self._client.health.state in HOPELESS:
            return False
        now = self._clock()
        if self._settle_deadline is None:
            self._settle_deadline = now + self._options.settle_timeout_seconds
        return now < self._settle_deadline

    def _poll(self, tracked: TrackedRequest) -> bool:
        if self._take_answer(tracked):
            return True
        # vLLM asks again at once. Without this the client's IO thread gets the interpreter only every 5 ms.
        time.sleep(0)
        return False

    def _take_answer(self, tracked: TrackedRequest) -> bool:
        assert tracked.pending is not None, "a request that is looking has asked"
        answer = tracked.pending.poll()
        if answer is None:
            return False
        self._looking.discard(tracked.request_id)
        tracked.pending = None
        tracked.answer = answer
        tracked.lease = answer.lease
        tracked.next_chunk = min([answer.attention_chunks, *tracked.refused_chunks])
        self._move(tracked, Event.ANSWER)
        return True

    def _offer(self, tracked: TrackedRequest) -> tuple[int, bool]:
        """The answer in vLLM's terms. vLLM may ask several times before it finds blocks."""
        if tracked.phase is not Phase.ANSWERED:
            return 0, False
        answer = tracked.answer
        chunk_tokens = tracked.chunk_tokens
        hit_tokens = answer.hit_chunks * chunk_tokens if answer is not None else 0
        external = max(0, hit_tokens - tracked.local_tokens) if tracked.lease else 0
        if not external:
            self._release(tracked)
        if self._recurrent and chunk_tokens:
            plan_snapshots(tracked, chunk_tokens, answer.snapshots if answer is not None else [])
            self._aim(tracked, tracked.local_tokens + external)
        return external, external > 0

    def _aim(self, tracked: TrackedRequest, position_tokens: int) -> None:
        aim(tracked, position_tokens, generated=self._options.store_generated)

    # --- loads ----------------------------------------------------------------------------------------------------

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """vLLM has allocated blocks: the load begins with the next step, or the hit is not used."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.phase is not Phase.ANSWERED:
            return
        if not external_tokens:
            self._release(tracked)
            self._move(tracked, Event.COMPUTE_ALLOCATED)
            return
        self._move(tracked, Event.LOAD_ALLOCATED)
        self.counters.hits += 1
        self.tally.add(lookup_hits=1)
        try:
            self._loads.append(self._load_job(tracked, blocks.get_block_ids(), external_tokens))
        except UnusableTable as error:
            logger.warning("Pagewarden cannot load request %s: %s", tracked.request_id, error)
            self._broken_loads.append(tracked.request_id)

    def _load_job(self, tracked: TrackedRequest, tables: BlockTables, external_tokens: int) -> LoadJob:
        answer, chunk_tokens = tracked.answer, tracked.chunk_tokens
        assert answer is not None, "only an answer can have promised tokens"
        promised = answer.hit_chunks * chunk_tokens
        if tracked.local_tokens + external_tokens != promised:
            raise UnusableTable(
                f"vLLM allocated {external_tokens} of {promised - tracked.local_tokens} tokens"
            )
        items = load_items(
            self._groups,
            tables,
            chunk_tokens=chunk_tokens,
            local_tokens=tracked.local_tokens,
            hit_chunks=answer.hit_chunks,
        )
        keys = tuple(tracked.keys_for(chunk_tokens, answer.hit_chunks))
        return LoadJob(tracked.request_id, tracked.lease, answer.hit_chunks, keys, tuple(items))

    def _load_ended(self, request_id: str, *, failed: bool) -> None:
        """All ranks have reported a load; `failed` if any of them could not use its part."""
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.phase not in (Phase.LOADING, Phase.ABANDONED):
            return
        self._release(tracked)
        if failed:
            self.counters.loads_failed += 1
            tracked.failed_loads += 1
            hit_chunks = tracked.answer.hit_chunks if tracked.answer is not None else 0
            # A load that failed as a whole says nothing about its objects; only its deepest boundary is given up.
            tracked.refused_chunks |= tracked.lost_chunks or {max(0, hit_chunks - 1)}
            self._move(tracked, Event.LOAD_FAILED)
        else:
            self._move(tracked, Event.LOADED)
        tracked.lost_chunks.clear()
        if tracked.ended:
            del self._requests[request_id]

    def _move(self, tracked: TrackedRequest, event: Event) -> None:
        """Move a request on. A call that vLLM never made so far costs one request's caching, not the engine."""
        try:
            tracked.move(event)
        except UnexpectedEvent:
            self.counters.unexpected_events += 1
            logger.exception("Pagewarden ignores a call that it did not expect")

    def _release(self, tracked: TrackedRequest) -> None:
        if tracked.lease:
            self._client.release(tracked.lease)
            tracked.lease = 0

    # --- steps ----------------------------------------------------------------------------------------------------

    def step(self, output: SchedulerOutput) -> StepOrders:
        """What the workers load and save in this step."""
        for request_id in tuple(self._looking):
            # vLLM asks for no request behind one that finds no blocks, and a lease is kept only once its answer is taken.
            self._take_answer(self._requests[request_id])
        for request_id in output.preempted_req_ids or ():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                self._preempted(tracked)
        state = output.kv_connector_block_state
        if state is not None:
            self._collect_saves(output.num_scheduled_tokens, state)
        if not output.total_num_scheduled_tokens:
            # Nothing is computed in this step, so vLLM would come back at once: let the client's threads, the workers
            # and a daemon on the same cores have this moment.
            time.sleep(IDLE_STEP_SECONDS)
        loads, self._loads = tuple(self._loads), []
        broken, self._broken_loads = tuple(self._broken_loads), []
        return StepOrders(loads=loads, saves=self._ledger.take_orders(), broken_loads=broken)

    def _collect_saves(self, scheduled: Mapping[str, int], state: KVConnectorBlockState) -> None:
        offers = state.boundary_state_offloads
        for request_id in scheduled.keys() | offers.keys():
            tracked = self._requests.get(request_id)
            if tracked is None or tracked.phase is not Phase.COMPUTING:
                continue
            computed = tracked.request.num_computed_tokens + scheduled.get(request_id, 0)
            self._saves.collect(
                tracked, computed, state.get_block_ids(request_id), offers.get(request_id, ())
            )
            if self._recurrent:
                self._aim(tracked, computed)

    # --- ends -----------------------------------------------------------------------------------------------------

    def finished(self, request: Request, tables: BlockTables) -> None:
        """vLLM is about to free the request's blocks: what is complete and not yet saved is pinned now."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        if tracked.phase is Phase.COMPUTING:
            self._saves.collect_last(tracked, tables)
        self._saves.drop_held(tracked)
        if tracked.pending is not None:
            self._looking.discard(tracked.request_id)
            tracked.pending.cancel()
            tracked.pending = None
        self._move(tracked, Event.FINISHED)
        if tracked.ended:
            self._release(tracked)
            del self._requests[request.request_id]

    def _preempted(self, tracked: TrackedRequest) -> None:
        if tracked.phase is Phase.COMPUTING:
            self._saves.drop_held(tracked)
            self._move(tracked, Event.PREEMPTED)

    def worker_news(self, report: Report | None, finished: Iterable[str], failed: Collection[str]) -> None:
        """Take what the workers report: saves done give their blocks back, loads done give back their leases.

        `finished` are the requests whose load every rank has reported, `failed` those of them that any rank failed.
        """
        if report is not None:
            for job_id, ranks in report.saves_done.items():
                self._ledger.reported(job_id, ranks)
            for request_id, chunks in report.failed_chunks.items():
                if request_id in self._requests:
                    self._requests[request_id].lost_chunks |= chunks
        for request_id in finished:
            self._load_ended(request_id, failed=request_id in failed)

    # --- the connector as a whole ---------------------------------------------------------------------------------

    def bind_block_pool(self, pool: BlockPool) -> None:
        """Take the pool whose blocks saves pin."""
        self._ledger.bind(pool)

    @property
    def saves_pending(self) -> bool:
        """Whether vLLM must keep stepping so that pinned blocks come back."""
        return self._ledger.pending

    def forget_stored(self) -> None:
        """Share nothing with what was stored before: after a reset, weights may differ from the fingerprint's.

        The engine's salt is changed to one that nobody else has, so it neither reads nor feeds the shared cache under
        a fingerprint that may no longer be true.
        """
        self._identities = IdentityReader(f"{self._options.salt}/reset:{secrets.token_hex(16)}")

    def stop(self) -> None:
        """Release everything and say goodbye; bounded by the client."""
        for tracked in self._requests.values():
            self._release(tracked)
        self._requests.clear()
        self._looking.clear()
        self._client.stop()
