"""The torch runtime with everything of it that a CPU has: tensors, tables, sums, and the interpreted kernel.

`torch.cuda` is replaced by a recorder, since there is none here: these tests hold the order of the runtime's calls and the
bytes that come out, not what a driver does. `scripts/device_check.py` does that, on a device.
"""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from connector.client.device import torch_runtime
from connector.client.device.engine import DeviceCopies
from connector.client.device.pinning import PinnedArena
from connector.client.device.runtime import RegistrationFailed
from kernels import Direction, Spans, reference_backend
from tests.support.device import PIECE, MemorySegment, registered


class Cuda:
    """Records what is asked of `torch.cuda`; work on CPU tensors is done at once."""

    def __init__(self):
        self.calls = []
        self.ignoring = set()
        self.register_answer = 0
        recorder = self

        class Event:
            def __init__(self, blocking=False):
                self.blocking = blocking

            def record(self, stream):
                recorder.calls.append(("record", stream.name))

            def synchronize(self):
                recorder.calls.append(("synchronize", self.blocking))

        class Stream:
            def __init__(self, device=None, name=None):
                self.name = name or f"side {sum(call[0] == 'stream' for call in recorder.calls)}"
                recorder.calls.append(("stream", self.name))

            def wait_event(self, event):
                recorder.calls.append(("wait_event", self.name))

            def synchronize(self):
                recorder.calls.append(("stream synchronize", self.name))

        self.Event, self.Stream = Event, Stream
        self.compute = Stream(name="compute")

    def current_stream(self, device=None):
        return self.compute

    def device(self, device):
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def stream(self, stream):
        self.calls.append(("on", stream.name))
        yield

    def cudart(self):
        def register(address, length, flags):
            assert threading.get_ident() in self.ignoring, "would spoil a graph capture"
            self.calls.append(("register", address, length, flags))
            return self.register_answer

        def unregister(address):
            assert threading.get_ident() in self.ignoring, "would spoil a graph capture"
            self.calls.append(("unregister", address))
            return 0

        return SimpleNamespace(
            cudaHostRegister=register,
            cudaHostUnregister=unregister,
            cudaGetErrorString=lambda code: f"error {code}",
        )


def always_the_cpu(*_):
    return torch.device("cpu")


def host_tensor(*size, pin_memory=False, **kwargs):
    return torch.empty(*size, **kwargs)


@pytest.fixture
def cuda(monkeypatch):
    recorder = Cuda()
    stand_in = SimpleNamespace(
        cuda=recorder,
        device=always_the_cpu,
        empty=host_tensor,
        int64=torch.int64,
        uint8=torch.uint8,
        version=SimpleNamespace(hip=None),
    )
    monkeypatch.setattr(torch_runtime, "torch", stand_in)

    def ignore_captures():
        recorder.ignoring.add(threading.get_ident())

    driver = SimpleNamespace(device_address=lambda address: address, ignore_captures=ignore_captures)
    monkeypatch.setattr(torch_runtime, "Driver", lambda hip: driver)
    return recorder


def make(cuda):
    return torch_runtime.TorchRuntime(torch.device("cuda", 0), bounce_bytes=128 << 10)


def test_copies_through_the_torch_runtime_are_those_of_the_reference(cuda):
    runtime = make(cuda)
    arena = PinnedArena(runtime, piece_bytes=PIECE, settle_seconds=0.01)
    copies = DeviceCopies(runtime, arena)
    assert threading.get_ident() not in cuda.ignoring, "the engine's own thread is the one that captures"
    segment = MemorySegment(60, populated=30 * PIECE)
    copies.mapped(segment)
    registered(arena, 30)
    pages = np.random.default_rng(0).integers(0, 256, 200_000, dtype=np.uint8)
    count = 400
    starts = np.arange(count, dtype=np.uint64) * np.uint64(448)
    spans = Spans(
        starts + np.uint64(pages.ctypes.data),
        starts + np.uint64(segment.data_address),
        np.full(count, 441, dtype=np.uint64),
        starts,
        np.arange(count, dtype=np.int32),
    )
    for direction in (Direction.STORE, Direction.LOAD):
        sums = copies.backend.copy_spans_checksummed(spans, direction, count)
        if direction is Direction.STORE:
            stored = segment.data.copy()
            expected = reference_backend().copy_spans_checksummed(spans, direction, count)
            np.testing.assert_array_equal(stored, segment.data)
            original = pages.copy()
            pages[:] = 0
        assert sums.tolist() == expected.tolist()
    inside = np.zeros(len(pages), dtype=bool)
    for start in starts.tolist():
        inside[start : start + 441] = True
    np.testing.assert_array_equal(pages, np.where(inside, original, 0))
    copies.close()
    pinned = [call for call in cuda.calls if call[0] == "register"]
    assert {flags for *_, flags in pinned} == {3}, "portable and mapped"
    assert len([call for call in cuda.calls if call[0] == "unregister"]) == len(pinned) == 30


def test_each_lane_has_its_own_stream_and_everything_is_put_on_it(cuda):
    runtime = make(cuda)
    lanes = [runtime.make_lane(direction) for direction in Direction]
    names = [lane._stream.name for lane in lanes]
    assert len({"compute", *names}) == 3
    memory = np.zeros(64, dtype=np.uint8)
    lane = lanes[0]
    cuda.calls.clear()
    lane.wait_for(runtime.mark())
    lane.begin(1)
    address = int(memory.ctypes.data)
    lane.launch(np.array([[address], [address + 32], [16], [0], [0]], dtype=np.int64))
    assert ("synchronize", True) not in cuda.calls, "only waiting may wait"
    lane.finish()
    assert cuda.calls[:2] == [("record", "compute"), ("wait_event", names[0])]
    assert {call[1] for call in cuda.calls if call[0] == "on"} == {names[0]}
    assert cuda.calls[-2:] == [("record", names[0]), ("synchronize", True)], (
        "waited for before what came last"
    )


def test_a_table_on_its_way_is_not_overwritten(cuda, monkeypatch):
    monkeypatch.setattr(torch_runtime, "FIRST_TABLE_ROWS", 4)
    lane = make(cuda).make_lane(Direction.LOAD)
    memory = np.zeros(64, dtype=np.uint8)
    address = int(memory.ctypes.data)
    table = np.array([[address], [address + 32], [16], [0], [0]], dtype=np.int64)
    lane.begin(1)
    for _ in range(3):
        lane.launch(table)
    hosts = {slot.host.data_ptr() for slot in lane._slots}
    assert len(hosts) == 3
    lane.synchronize()
    lane.launch(np.repeat(table, 30, axis=1))
    assert len(lane._slots) == 3
    assert lane._slots[0].host.numel() >= 150
    lane.finish()


def test_a_refused_registration_names_the_drivers_reason(cuda):
    runtime = make(cuda)
    cuda.register_answer = 2
    with pytest.raises(RegistrationFailed, match=r"error 2 \(2\)"):
        runtime.register(4096, 4096)


def test_pinned_memory_that_the_device_cannot_see_is_given_back(cuda):
    runtime = make(cuda)

    def unknown(address):
        raise RegistrationFailed("unknown")

    runtime.driver.device_address = unknown
    with pytest.raises(RegistrationFailed, match="unknown"):
        runtime.register(8192, 4096)
    assert ("unregister", 8192) in cuda.calls
