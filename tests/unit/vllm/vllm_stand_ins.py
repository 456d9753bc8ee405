"""The few attributes of vLLM's objects that the connector reads, and a client whose answers a test writes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from appliance.geometry import GroupKind, ObjectGroup
from appliance.protocol.messages import LookupResult
from connector.client import ClientState
from connector.vllm.options import ConnectorOptions
from connector.vllm.scheduler import SchedulerSide

ATTENTION = ObjectGroup(0, "attention-0", GroupKind.ATTENTION, block_tokens=4, shards=1, replicas=1)
RECURRENT = ObjectGroup(1, "recurrent-1", GroupKind.RECURRENT, block_tokens=4, shards=1, replicas=1)
SLIDING = ObjectGroup(
    1, "sliding-1", GroupKind.SLIDING, block_tokens=4, shards=1, replicas=1, window_tokens=9
)
CHUNK = 8


class Request:
    """A request of `prompt` token ids; `generate` appends one."""

    def __init__(self, name: str, prompt: Sequence[int], max_tokens: int = 64) -> None:
        self.request_id = name
        self.prompt_token_ids = list(prompt)
        self.all_token_ids = list(prompt)
        self.max_tokens = max_tokens
        self.num_computed_tokens = 0
        self.shared_prefix_boundary = 0
        self.prompt_embeds = None
        self.lora_request = None
        self.mm_features: list[Any] = []
        self.cache_salt: str | None = None
        self.resumable = False
        self.skip_reading_prefix_cache = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class BlockPool:
    """Counts holds on blocks as vLLM's pool does."""

    def __init__(self, blocks: int) -> None:
        self.num_gpu_blocks = blocks
        self.blocks = [
            SimpleNamespace(block_id=number, ref_cnt=0, block_hash=None, block_hash_num_tokens=None)
            for number in range(blocks)
        ]

    def touch(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0

    @property
    def held(self) -> set[int]:
        return {block.block_id for block in self.blocks if block.ref_cnt}


class Lookup:
    """A lookup that has no answer until the test gives one."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked = asked
        self.answer: LookupResult | None = None
        self.cancelled = False

    def poll(self) -> LookupResult | None:
        return self.answer

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class Client:
    """Records what the scheduler's half asks of its client."""

    chunk_tokens: int | None = CHUNK
    state: ClientState = ClientState.JOINED
    lookups: list[Lookup] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    stopped: bool = False

    @property
    def health(self) -> Any:
        return SimpleNamespace(state=self.state)

    def lookup(self, request_id: str, keys: Sequence[bytes], **asked: Any) -> Lookup:
        self.lookups.append(Lookup({"request_id": request_id, "keys": list(keys), **asked}))
        return self.lookups[-1]

    def release(self, lease: int) -> None:
        self.released.append(lease)

    def stop(self) -> None:
        self.stopped = True


@dataclass
class Blocks:
    """Block tables of one request, by group."""

    tables: tuple[list[int], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self.tables


@dataclass
class Engine:
    """A scheduler's half with its client and pool, and the calls that vLLM makes."""

    groups: tuple[ObjectGroup, ...] = (ATTENTION, RECURRENT)
    world_size: int = 1
    options: ConnectorOptions = field(default_factory=ConnectorOptions)
    clock: Callable[[], float] = lambda: 0.0
    client: Client = field(default_factory=Client)
    pool: BlockPool = field(default_factory=lambda: BlockPool(400))

    def __post_init__(self) -> None:
        self.side = SchedulerSide(self.client, self.groups, self.options, self.world_size, self.clock)  # type: ignore[arg-type]
        self.side.bind_block_pool(self.pool)  # type: ignore[arg-type]

    def ask(self, request: Request, local_tokens: int = 0) -> tuple[int | None, bool]:
        return self.side.matched_tokens(request, local_tokens)  # type: ignore[arg-type]

    def answer(self, **result: Any) -> None:
        self.client.lookups[-1].answer = LookupResult(**result)

    def allocate(self, request: Request, tables: tuple[list[int], ...], external_tokens: int) -> None:
        self.side.allocated(request, Blocks(tables), external_tokens)  # type: ignore[arg-type]

    def step(
        self,
        scheduled: dict[str, int] | None = None,
        tables: dict[str, tuple[list[int], ...]] | None = None,
        offers: dict[str, list[tuple[int, int, int]]] | None = None,
        preempted: Sequence[str] = (),
    ) -> Any:
        scheduled = scheduled or {}
        state = SimpleNamespace(boundary_state_offloads=offers or {}, get_block_ids=(tables or {}).get)
        output = SimpleNamespace(
            preempted_req_ids=set(preempted),
            kv_connector_block_state=state,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
        )
        return self.side.step(output)  # type: ignore[arg-type]

    def compute(self, request: Request, tokens: int, table: tuple[list[int], ...], **offers: Any) -> Any:
        """One step that computes `tokens` of the request."""
        orders = self.step({request.request_id: tokens}, {request.request_id: table}, **offers)
        request.num_computed_tokens += tokens
        return orders

    def admit(self, request: Request, tables: tuple[list[int], ...]) -> None:
        """Ask, be told of a miss, and start to compute."""
        if self.ask(request)[0] is None:
            self.answer(hit_chunks=0)
            assert self.ask(request) == (0, False)
        self.allocate(request, tables, 0)
