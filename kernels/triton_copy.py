"""The Triton backend: gather and scatter from a pointer table, the checksum `pw64/1` in the same pass.

One kernel does both directions: its table says where each row is read and where it is written, so gathering pages into
the arena and scattering the arena into pages differ only in which column is which. The sums are taken from the
registers that are stored. A fixed number of programs share the rows, so that a copy occupies a bounded part of the
device however much it moves.

With `TRITON_INTERPRET=1` in the environment when this module is imported, the same kernel runs on CPU tensors and on
addresses of this process. Otherwise every address must be one that the device can access: device memory, or host
memory registered with it, under the address that the device has for it.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from kernels import checksum
from kernels.backend import Backend, load_backend
from kernels.pointer_table import Column, pointer_table
from kernels.reference import check_object_count
from kernels.spans import WORD_BYTES, Direction, Spans

WARPS = 8
BLOCK_WORDS = 2048
"""Words that a program has in flight at a time: 16 KiB, which is 64 bytes in each of 256 threads."""
BLOCK_BYTE_ROWS = 256
"""Words at a time where bytes must be taken one by one."""
PROGRAMS = 32
"""Programs of one launch, at most: the share of the device that a copy may take. Not tuned on a device yet."""

_KEY_STEP = tl.constexpr(checksum.KEY_STEP)
_FIRST_SHIFT = tl.constexpr(checksum.FIRST_SHIFT)
_FIRST_MULTIPLIER = tl.constexpr(checksum.FIRST_MULTIPLIER)
_SECOND_SHIFT = tl.constexpr(checksum.SECOND_SHIFT)
_SECOND_MULTIPLIER = tl.constexpr(checksum.SECOND_MULTIPLIER)
_LAST_SHIFT = tl.constexpr(checksum.LAST_SHIFT)
_WORD_BYTES = tl.constexpr(WORD_BYTES)


@triton.jit
def _mixed(words, index):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """f(w, i) of the checksum definition; both are blocks."""
    mixed = words + (index + 1).to(tl.uint64) * _KEY_STEP
    mixed = (mixed ^ (mixed >> _FIRST_SHIFT)) * _FIRST_MULTIPLIER
    mixed = (mixed ^ (mixed >> _SECOND_SHIFT)) * _SECOND_MULTIPLIER
    return mixed ^ (mixed >> _LAST_SHIFT)


@triton.jit  # type: ignore[untyped-decorator]
def _copy_words(  # type: ignore[no-untyped-def]  # noqa: ANN202
    source,  # noqa: ANN001
    destination,  # noqa: ANN001
    words,  # noqa: ANN001
    first_word,  # noqa: ANN001
    wide: tl.constexpr,
    checksummed: tl.constexpr,
    block: tl.constexpr,
):
    """Copy whole words from and to multiples of 8, of 16 where `wide` (then `words` is even); return their sum."""
    reads = source.to(tl.pointer_type(tl.uint64))
    writes = destination.to(tl.pointer_type(tl.uint64))
    total = tl.zeros((block,), tl.uint64)
    for start in range(0, words, block):
        word = start + tl.arange(0, block)
        inside = word < words
        read_at, write_at = reads + word, writes + word
        if wide:
            # The compiler cannot see what a table holds; this is what turns two words into one 128-bit access.
            read_at, write_at = tl.multiple_of(read_at, 16), tl.multiple_of(write_at, 16)
        value = tl.load(read_at, mask=inside, other=0)
        tl.store(write_at, value, mask=inside)
        if checksummed:
            total += tl.where(inside, _mixed(value, first_word + word), 0)
    return tl.sum(total)


@triton.jit  # type: ignore[untyped-decorator]
def _copy_bytes(  # type: ignore[no-untyped-def]  # noqa: ANN202
    source,  # noqa: ANN001
    destination,  # noqa: ANN001
    start,  # noqa: ANN001
    length,  # noqa: ANN001
    first_word,  # noqa: ANN001
    checksummed: tl.constexpr,
    block: tl.constexpr,
):
    """Copy bytes `start` to `length` of any alignment; `start` is a multiple of 8. Return the sum of their words."""
    reads = source.to(tl.pointer_type(tl.uint8))
    writes = destination.to(tl.pointer_type(tl.uint8))
    total = tl.zeros((block,), tl.uint64)
    word = tl.arange(0, block)
    lane = tl.arange(0, _WORD_BYTES)
    for at in range(start, length, block * _WORD_BYTES):
        offset = at + word[:, None] * _WORD_BYTES + lane[None, :]
        inside = offset < length
        value = tl.load(reads + offset, mask=inside, other=0)
        tl.store(writes + offset, value, mask=inside)
        if checksummed:
            whole = tl.sum(value.to(tl.uint64) << (lane * 8)[None, :].to(tl.uint64), axis=1)
            mixed = _mixed(whole, first_word + at // _WORD_BYTES + word)
            total += tl.where(at + word * _WORD_BYTES < length, mixed, 0)
    return tl.sum(total)


@triton.jit(do_not_specialize=["stride", "rows"])  # type: ignore[untyped-decorator]
def copy_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN201
    table,  # noqa: ANN001
    stride,  # noqa: ANN001
    rows,  # noqa: ANN001
    sums,  # noqa: ANN001
    checksummed: tl.constexpr,
    block_words: tl.constexpr,
    block_byte_rows: tl.constexpr,
):
    """Work through `rows` rows of a pointer table whose columns are `stride` apart; see `pointer_table`."""
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        source = tl.load(table + row)
        destination = tl.load(table + stride + row)
        length = tl.load(table + 2 * stride + row)
        first_word = tl.load(table + 3 * stride + row)
        alignment = (source | destination) & 15
        done = length - length
        total = done.to(tl.uint64)
        if alignment == 0:
            done = length // 16 * 16
            total += _copy_words(
                source,
                destination,
                length // 16 * 2,
                first_word,
                wide=True,
                checksummed=checksummed,
                block=block_words,
            )
        elif alignment == 8:
            done = length // 8 * 8
            total += _copy_words(
                source,
                destination,
                length // 8,
                first_word,
                wide=False,
                checksummed=checksummed,
                block=block_words,
            )
        total += _copy_bytes(source, destination, done, length, first_word, checksummed, block_byte_rows)
        if checksummed:
            owner = tl.load(table + 4 * stride + row)
            # Addition commutes, so the sum does not depend on which program comes first.
            tl.atomic_add(sums.to(tl.pointer_type(tl.uint64)) + owner, total, sem="relaxed")


def launch(
    table: torch.Tensor, rows: int, sums: torch.Tensor, *, checksummed: bool = True, programs: int = PROGRAMS
) -> None:
    """Start the copy of a table on the current stream of its device; returns before it has ended.

    `table` is int64[5, rows] on the device, contiguous; `sums` is int64[objects] there, to which raw sums are added.
    """
    assert tuple(table.shape) == (len(Column), rows), "the kernel would read addresses from somewhere else"
    assert table.is_contiguous(), "the kernel would read addresses from somewhere else"
    if rows:
        copy_kernel[(min(programs, rows),)](
            table,
            rows,
            rows,
            sums,
            checksummed=checksummed,
            block_words=BLOCK_WORDS,
            block_byte_rows=BLOCK_BYTE_ROWS,
            num_warps=WARPS,
        )


def _run(
    spans: Spans, direction: Direction, object_count: int, device: torch.device, *, checksummed: bool
) -> NDArray[np.uint64]:
    check_object_count(spans, object_count)
    table = torch.from_numpy(pointer_table(spans, direction)).to(device)
    sums = torch.zeros(max(1, object_count), dtype=torch.int64, device=device)
    launch(table, table.shape[1], sums, checksummed=checksummed)
    # Waits for the kernel, since it is on the same stream.
    result: NDArray[np.uint64] = sums.cpu().numpy().view(np.uint64)[:object_count]
    return result


def triton_backend(device: torch.device) -> Backend:
    """Return the backend that copies on the current stream of `device` and waits for it.

    What needs no device (reading a stream in host memory, fences, commit words) is the CPU backend's.
    """
    host = load_backend()

    def copy_spans(spans: Spans, direction: Direction) -> None:
        _run(spans, direction, spans.object_count, device, checksummed=False)

    def copy_spans_checksummed(spans: Spans, direction: Direction, object_count: int) -> NDArray[np.uint64]:
        return _run(spans, direction, object_count, device, checksummed=True)

    return Backend(
        name="triton",
        copy_spans=copy_spans,
        copy_spans_checksummed=copy_spans_checksummed,
        checksum_bytes=host.checksum_bytes,
        acquire_fence=host.acquire_fence,
        load_word=host.load_word,
    )
