"""Random lives of objects in a real arena, against a model that is too simple to be wrong and against the file."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from appliance.l1.eviction import Prompt
from appliance.l1.index import NamespaceIndex
from appliance.l1.removals import Removal
from appliance.leases import LeaseState
from appliance.lookup import entries_of, find
from appliance.protocol import arena_layout as layout
from appliance.protocol.base import MissReason
from appliance.reservations import ReservationState
from tests.support.core_model import Entry, Held, Model, Thing, Writing, check_record, read_tables
from tests.support.core_store import (
    CHUNK,
    EXTENT,
    World,
    attention,
    chain,
    namespace_id,
    recurrent,
    sliding,
)

PROMPTS = [chain(1, 2, 3, 4), chain(1, 2, 5, 6), chain(7, 8)]
ATTACH_IDS = (11, 12)
WRITE_TTL, READ_TTL, INCOMPLETE_GRACE = 40.0, 25.0, 60.0


class StoreMachine(RuleBasedStateMachine):
    """Writers, readers, an admin and time, all at once."""

    policy = "LRU"
    reservations = Bundle("reservations")
    leases = Bundle("leases")

    @initialize(two_segments=st.booleans(), limited=st.booleans(), full=st.sampled_from([True, True, False]))
    def begin(self, two_segments: bool, limited: bool, full: bool) -> None:
        self.segments = (14, 10) if two_segments else (24,)
        self.limit = 10 * EXTENT if limited else 1 << 40
        self.world = World(self.segments, self.limit, self.policy)
        self.world.store.incomplete_grace_seconds = INCOMPLETE_GRACE
        self.world.observer.on_removed = self.on_removed
        self.model = Model()
        hybrid = self.world.namespace(1, attention(0, 2), recurrent(1))
        windowed = self.world.namespace(2, attention(0), sliding(1, 2, 2))
        self.indexes: list[NamespaceIndex] = [hybrid, windowed]
        self.words = [np.zeros(extents, dtype=np.uint64) for extents in self.segments]
        self.serial = 0
        if full:
            self.store_prompt_as(0, 0, 4, 1, 2)
            self.store_prompt_as(1, 1, 4, 1, 2)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self.end_everything()
        finally:
            self.world.close()

    def end_everything(self) -> None:
        """After the last hold and acknowledgement nothing may be left behind, in memory or in the index."""
        world = self.world
        for lease in list(self.model.leases):
            self.release(lease)
        self.clear(None)
        for attach_id in ATTACH_IDS:
            self.acknowledge_all(attach_id)
        account = world.arena.account()
        assert account.free == account.populated
        assert not world.arena.limbo_by_attach
        for index in self.indexes:
            assert index.row_count == 0
            assert len(set(index._free_rows)) == len(index._free_rows) == index._rows_made
            assert all(
                not (t.objects or t.extents or t.leased_extents or t.reserved_extents) for t in index.totals
            )
        assert not +world.reservations.reserved_bytes
        assert not +world.reservations.limbo_bytes

    # --- the store tells ----------------------------------------------------------------------------------------

    def on_removed(self, gone: tuple[str, bytes, int, Removal, int]) -> None:
        namespace, key, group, cause, extents = gone
        entry = namespace, key, group, self.model.lives[namespace]
        things = self.model.of(entry)
        assert things, f"{entry} was removed and is no object"
        assert sum(thing.extents for thing in things) == extents
        held = self.model.held(entry)
        if cause in (Removal.EVICTED, Removal.STRANDED):
            assert not held, "an entry under a live lease was evicted"
            assert not self.model.pending(entry)
        if cause is Removal.STRANDED:
            index = self.index_of(namespace)
            assert len(things) < index.groups[group].shards
            assert self.world.clock() - self.model.incomplete_since[entry] >= INCOMPLETE_GRACE
        for thing in things:
            del self.model.objects[thing.name]
            if held:
                self.model.doomed.append(thing)
        self.model.incomplete_since.pop(entry, None)

    def index_of(self, namespace: str) -> NamespaceIndex:
        return self.world.store.namespaces[namespace]

    # --- writers ------------------------------------------------------------------------------------------------

    @rule(
        target=reservations,
        which=st.integers(0, 1),
        prompt=st.integers(0, 2),
        chunk=st.integers(0, 3),
        group=st.integers(0, 1),
        shard=st.integers(0, 1),
        length=st.sampled_from([1, EXTENT - 1, EXTENT, EXTENT + 1, 3 * EXTENT, 5 * EXTENT - 7, 15 * EXTENT]),
        writer=st.integers(0, 1),
    )
    def reserve(self, which, prompt, chunk, group, shard, length, writer):
        reservation = self.ask_for(which, prompt, chunk, group, shard, length, writer)
        return multiple() if reservation is None else reservation

    def ask_for(
        self, which: int, prompt: int, chunk: int, group: int, shard: int, length: int, writer: int
    ) -> int | None:
        index, keys = self.indexes[which], PROMPTS[prompt]
        chunk %= len(keys)
        shard %= index.groups[group].shards
        name = namespace_id(which + 1), keys[chunk], group, shard
        expected = self.model.expected_grant(name, -(-length // EXTENT), self.limit, self.segments)
        attach_id, session = ATTACH_IDS[writer], b"w%d" % writer
        grant, reservation = self.world.reserve(
            index,
            keys,
            chunk,
            group,
            shard,
            length=length,
            attach_id=attach_id,
            session=session,
            ttl_seconds=WRITE_TTL,
        )
        assert grant is expected, (name, length)
        if reservation is None:
            return None
        self.serial += 1
        data = (b"%08d" % self.serial * (length // 8 + 1))[:length]
        thing = Thing(name, reservation.reserved.placement, data, self.model.lives[name[0]])
        self.world.write(thing.placement, data)
        self.model.writing[reservation.reservation_id] = Writing(
            thing, attach_id, session, self.world.clock() + WRITE_TTL
        )
        return reservation.reservation_id

    @rule(
        which=st.integers(0, 1),
        prompt=st.integers(0, 2),
        chunks=st.integers(1, 4),
        extents=st.integers(1, 3),
        ranks=st.sampled_from([2, 2, 1]),
    )
    def store_prompt(self, which, prompt, chunks, extents, ranks):
        """What an engine does with a prompt: every object of its first chunks, in order; a rank may be missing."""
        self.store_prompt_as(which, prompt, chunks, extents, ranks)

    def store_prompt_as(self, which: int, prompt: int, chunks: int, extents: int, ranks: int) -> None:
        for chunk in range(min(chunks, len(PROMPTS[prompt]))):
            for group in self.indexes[which].groups:
                for shard in range(min(ranks, group.shards)):
                    got = self.ask_for(which, prompt, chunk, group.index, shard, extents * EXTENT, writer=0)
                    if got is not None:
                        self.commit_as(got, impostor=False)

    @rule(reservation=reservations, impostor=st.sampled_from([False, False, False, True]))
    def commit(self, reservation, impostor):
        self.commit_as(reservation, impostor=impostor)

    def commit_as(self, reservation: int, *, impostor: bool) -> None:
        writing = self.model.writing.get(reservation)
        session = b"nobody" if impostor else writing.session if writing else b"w0"
        checksum = 1_000_000 + self.serial
        done = self.world.reservations.commit(session, reservation, checksum)
        if writing is None or impostor:
            assert done is None, "a commit that came too late was taken"
            return
        assert done is not None
        index, row = done.reserved.index, done.reserved.row
        fresh = np.array([index.entry(row, done.reserved.record.group)], dtype=np.int64)
        self.world.store.touch_chain(index, row, fresh)
        del self.model.writing[reservation]
        thing = writing.thing
        thing.word = layout.word_of(thing.placement.generation, committed=True)
        thing.checksum = checksum
        self.model.objects[thing.name] = thing
        shards = self.index_of(thing.name[0]).groups[thing.name[2]].shards
        if len(self.model.of(thing.entry)) == shards:
            self.model.incomplete_since.pop(thing.entry, None)
        else:
            self.model.incomplete_since.setdefault(thing.entry, self.world.clock())

    @rule(reservation=reservations, undelivered=st.booleans())
    def abort(self, reservation, undelivered):
        cause = ReservationState.UNDELIVERED if undelivered else ReservationState.ABORTED
        ended = self.world.reservations.end(reservation, cause)
        assert ended == (reservation in self.model.writing)
        self.model.writing.pop(reservation, None)

    @rule(writer=st.integers(0, 1))
    def writer_session_ends(self, writer):
        mine = [each for each, writing in self.model.writing.items() if writing.session == b"w%d" % writer]
        assert self.world.reservations.end_session(b"w%d" % writer) == len(mine)
        self.to_limbo(mine)

    def to_limbo(self, ended: list[int]) -> None:
        for each in ended:
            self.model.limbo[each] = self.model.writing.pop(each)

    @rule(reservation=reservations)
    def a_stopped_writer_wakes_up(self, reservation):
        """It writes once more into what it believes is its own: nobody else may have it."""
        writing = self.model.limbo.get(reservation) or self.model.writing.get(reservation)
        if writing is not None:
            thing = writing.thing
            thing.data = bytes(byte ^ 0xFF for byte in thing.data[:64]) + thing.data[64:]
            self.world.write(thing.placement, thing.data)

    @rule(reservation=reservations, wrong=st.booleans())
    def acknowledge(self, reservation, wrong):
        writing = self.model.limbo.get(reservation)
        attach_id = writing.attach_id if writing else ATTACH_IDS[0]
        stopped = self.world.reservations.stopped(attach_id + 100 * wrong, reservation)
        assert stopped == (writing is not None and not wrong)
        if stopped:
            del self.model.limbo[reservation]

    @rule(attach_id=st.sampled_from(ATTACH_IDS))
    def acknowledge_all(self, attach_id):
        mine = [each for each, writing in self.model.limbo.items() if writing.attach_id == attach_id]
        assert self.world.reservations.revocations(attach_id) == sorted(mine)
        self.world.reservations.all_stopped(attach_id)
        for each in mine:
            del self.model.limbo[each]

    # --- readers ------------------------------------------------------------------------------------------------

    @rule(target=leases, which=st.integers(0, 1), prompt=st.integers(0, 2), reader=st.integers(0, 1))
    def look_up(self, which, prompt, reader):
        index, keys = self.indexes[which], PROMPTS[prompt]
        found = find(index, self.world.store.ghosts, keys, len(keys) * CHUNK + 1)
        hit = self.model.expected_hit(index, keys)
        assert found.reach.hit == hit
        assert (found.reason is None) == (hit == len(keys))
        entries = entries_of(index, found.rows, hit)
        names = self.model.needed(index, keys, hit)
        assert {self.name_of(index, int(entry)) for entry in entries} == names
        assert len(entries) == len(names)
        if not hit:
            return multiple()
        session = b"r%d" % reader
        lease = self.world.leases.grant(session, "e", "request", index, hit, entries, READ_TTL)
        extents = sum(thing.extents for entry in names for thing in self.model.of(entry))
        assert lease.bytes_held == extents * EXTENT
        self.model.leases[lease.lease_id] = Held(frozenset(names), session, self.world.clock() + READ_TTL)
        return lease.lease_id

    def name_of(self, index: NamespaceIndex, entry: int) -> Entry:
        row, group = divmod(entry, index.group_count)
        namespace = index.namespace.hex()
        return namespace, index.key_of(row), group, self.model.lives[namespace]

    @rule(lease=leases)
    def release(self, lease):
        released = self.world.leases.end(lease, LeaseState.RELEASED)
        assert released == (lease in self.model.leases)
        self.drop_lease(lease)

    def drop_lease(self, lease: int) -> None:
        self.model.leases.pop(lease, None)
        self.model.doomed = [thing for thing in self.model.doomed if self.model.held(thing.entry)]

    @rule(reader=st.integers(0, 1), named=st.sets(consumes(leases), max_size=3))
    def heartbeat(self, reader, named):
        session = b"r%d" % reader
        gone = self.world.leases.heard(session, named, lambda _: READ_TTL)
        mine = {each for each, held in self.model.leases.items() if held.session == session}
        assert gone == sorted(named - mine)
        for each in mine:
            held = self.model.leases[each]
            held.unnamed = 0 if each in named else held.unnamed + 1
            if each in named:
                held.deadline = self.world.clock() + READ_TTL
            elif held.unnamed == 3:
                self.drop_lease(each)

    @rule(reader=st.integers(0, 1))
    def reader_session_ends(self, reader):
        mine = [each for each, held in self.model.leases.items() if held.session == b"r%d" % reader]
        assert self.world.leases.end_session(b"r%d" % reader) == len(mine)
        for each in mine:
            self.drop_lease(each)

    # --- time and the admin -----------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1.0, 20.0, 70.0]))
    def time_passes(self, seconds):
        self.world.clock.advance(seconds)
        now = self.world.clock()
        late = [each for each, held in self.model.leases.items() if held.deadline <= now]
        assert self.world.leases.expire() == len(late)
        for each in late:
            self.drop_lease(each)
        overdue = [each for each, writing in self.model.writing.items() if writing.deadline <= now]
        assert self.world.reservations.expire() == len(overdue)
        self.to_limbo(overdue)

    @rule(extents=st.integers(0, 24))
    def evict_down_to(self, extents):
        self.world.store.evict_down_to(extents * EXTENT, at_most=1000)
        stuck = sum(
            thing.extents
            for thing in self.model.objects.values()
            if self.model.held(thing.entry) or self.model.pending(thing.entry)
        )
        assert self.world.arena.account().occupied <= max(stuck, extents) * EXTENT

    @rule(which=st.sampled_from([None, 0, 1]))
    def clear(self, which):
        namespace = None if which is None else namespace_id(which + 1)
        index = None if which is None else self.indexes[which]
        ended = [
            each
            for each, writing in self.model.writing.items()
            if which is None or writing.thing.name[0] == namespace
        ]
        assert self.world.reservations.end_namespace(index, ReservationState.CLEARED) == len(ended)
        self.to_limbo(ended)
        before = [t for t in self.model.objects.values() if which is None or t.name[0] == namespace]
        epoch, objects, extents = self.world.store.clear(namespace)
        assert (objects, extents) == (len(before), sum(thing.extents for thing in before))
        assert self.world.arena.clear_epoch_of(bytes.fromhex(namespace or namespace_id(9))) == epoch
        for each in self.indexes if index is None else [index]:
            assert each.row_count == 0
            self.model.lives[each.namespace.hex()] += 1

    @precondition(lambda self: self.model.objects)
    @rule(data=st.data())
    def quarantine(self, data):
        namespace, key, group, _ = data.draw(st.sampled_from(sorted(self.model.objects)))
        index = self.index_of(namespace)
        self.world.store.remove(index, index.find(key), group, Removal.QUARANTINED)
        assert not [
            thing for thing in self.model.objects.values() if thing.name[:3] == (namespace, key, group)
        ]

    # --- what always holds --------------------------------------------------------------------------------------

    @invariant()
    def accounts_add_up(self):
        account = self.world.arena.account()
        model = self.model
        assert account.populated == sum(self.segments) * EXTENT == account.capacity
        parts = (account.free, account.reserved, account.occupied, account.draining, account.limbo)
        assert sum(parts) == account.populated
        assert account.reserved == self.bytes_of([each.thing for each in model.writing.values()])
        assert account.occupied == self.bytes_of(list(model.objects.values()))
        assert account.draining == self.bytes_of(model.doomed)
        assert account.limbo == self.bytes_of([each.thing for each in model.limbo.values()])
        reservations = self.world.reservations
        assert reservations.reserved_bytes["e"] == account.reserved
        assert reservations.limbo_bytes["e"] == account.limbo

    @staticmethod
    def bytes_of(things: list[Thing]) -> int:
        return sum(thing.extents for thing in things) * EXTENT

    @invariant()
    def totals_are_a_recount(self):
        for which, index in enumerate(self.indexes):
            for group, totals in enumerate(index.totals):
                mine = [
                    thing
                    for thing in self.model.objects.values()
                    if thing.name[0] == namespace_id(which + 1) and thing.name[2] == group
                ]
                writing = [
                    each.thing.extents
                    for each in self.model.writing.values()
                    if each.thing.name[0] == namespace_id(which + 1) and each.thing.name[2] == group
                ]
                assert totals.objects == len(mine)
                assert totals.extents == sum(thing.extents for thing in mine)
                assert totals.reserved_extents == sum(writing)
                leased = sum(thing.extents for thing in mine if self.model.held(thing.entry))
                assert totals.leased_extents == leased

    @invariant()
    def no_extent_has_two_owners(self):
        owned: set[tuple[int, int]] = set()
        for thing in self.model.everything:
            assert thing.extents == -(-len(thing.data) // EXTENT)
            for first, count in thing.placement.runs:
                for extent in range(first, first + count):
                    assert (thing.placement.segment, extent) not in owned
                    owned.add((thing.placement.segment, extent))
        for number, space in enumerate(self.world.arena.spaces):
            for extent in range(self.segments[number]):
                assert space.allocator.is_free(extent) == ((number, extent) not in owned)

    @invariant()
    def the_file_says_the_same(self):
        tables = []
        for number, space in enumerate(self.world.arena.spaces):
            records, links, raw = read_tables(self.world.files[number], space.segment.shape)
            assert (records["commit_word"] >= self.words[number]).all(), "a generation went back"
            self.words[number] = records["commit_word"].copy()
            tables.append((records, links, raw))
        committed = set()
        states = [(thing, layout.STATE_COMMITTED) for thing in self.model.objects.values()]
        states += [(thing, layout.STATE_DOOMED) for thing in self.model.doomed]
        for thing, state in states:
            record = check_record(thing, tables[thing.placement.segment], state)
            assert int(record["commit_word"]) == thing.word
            assert int(record["checksum"]) == thing.checksum
            committed.add((thing.placement.segment, thing.placement.extent))
        for writing in [*self.model.writing.values(), *self.model.limbo.values()]:
            record = check_record(
                writing.thing, tables[writing.thing.placement.segment], layout.STATE_WRITING
            )
            assert int(record["commit_word"]) == writing.thing.placement.generation << 1
            assert int(record["attach_id"]) == writing.attach_id
        for number, (records, _, _) in enumerate(tables):
            found = {(number, int(head)) for head in np.flatnonzero(records["commit_word"] & np.uint64(1))}
            assert found == {each for each in committed if each[0] == number}, "a stale record is committed"
            writing_heads = {int(head) for head in np.flatnonzero(records["state"] == layout.STATE_WRITING)}
            unfinished = [*self.model.writing.values(), *self.model.limbo.values()]
            assert writing_heads == {
                each.thing.placement.extent for each in unfinished if each.thing.placement.segment == number
            }

    @invariant()
    def every_byte_is_where_it_was_put(self):
        for thing in self.model.everything:
            assert self.world.read(thing.placement, len(thing.data)) == thing.data

    @invariant()
    def what_is_committed_is_found(self):
        for (namespace, key, group, shard), thing in self.model.objects.items():
            index = self.index_of(namespace)
            row = index.find(key)
            assert row >= 0
            assert index.address(row, group, shard) == thing.placement.address
            segment, word, length, checksum, runs = self.world.arena.describe(thing.placement.address)
            assert (segment, word, length, checksum, tuple(runs)) == (
                thing.placement.segment,
                thing.word,
                len(thing.data),
                thing.checksum,
                thing.placement.runs,
            )
            assert self.world.arena.word_at(thing.placement.address) == thing.word
        self.no_row_outlives_its_chunk()
        for index in self.indexes:
            for keys in PROMPTS:
                reason = find(index, self.world.store.ghosts, keys, len(keys) * CHUNK + 1).reason
                assert reason is not MissReason.TOO_SHORT

    def no_row_outlives_its_chunk(self) -> None:
        things = [*self.model.objects.values(), *self.model.doomed]
        alive = {thing.name[:2] for thing in things if thing.life == self.model.lives[thing.name[0]]}
        alive |= {each.thing.name[:2] for each in self.model.writing.values()}
        for index in self.indexes:
            rows = list(index.rows())
            assert index.row_count == len(rows)
            for row in rows:
                assert (index.namespace.hex(), index.key_of(row)) in alive, "a row would never be given back"


class ReturnsMachine(StoreMachine):
    """The same under the default policy, which besides must be able to give back every entry."""

    policy = "RETURNS"

    @rule(which=st.integers(0, 1), prompt=st.integers(0, 2))
    def prompt_comes(self, which, prompt):
        index, keys = self.indexes[which], PROMPTS[prompt]
        found = find(index, self.world.store.ghosts, keys, len(keys) * CHUNK + 1)
        asked = Prompt(keys, found.rows, found.reach.hit, found.reach.attention)
        assert all(0 < wish <= len(keys) for wish in self.world.store.policy.asked(index, asked))

    @invariant()
    def everything_is_covered(self):
        for index in self.indexes:
            present = np.flatnonzero(index.present.array)
            assert self.world.store.policy.covers(index, present).all()


TestStoreMachine = StoreMachine.TestCase
TestReturnsMachine = ReturnsMachine.TestCase
TestStoreMachine.settings = TestReturnsMachine.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
