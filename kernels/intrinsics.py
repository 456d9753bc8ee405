"""LLVM building blocks of the numba backend: what numba's Python subset cannot say.

Loops work on lines of 64 bytes as vectors of eight 64-bit words. That is LLVM's portable vector type: it becomes
one AVX-512 register, two AVX2 registers or four NEON registers, whichever the host has.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.checksum import (
    FIRST_MULTIPLIER,
    FIRST_SHIFT,
    KEY_STEP,
    LAST_SHIFT,
    SECOND_MULTIPLIER,
    SECOND_SHIFT,
)

if TYPE_CHECKING:
    from collections.abc import Callable

LINE_BYTES = 64
LINE_WORDS = 8
UNROLL = 4

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_LINE = ir.VectorType(_I64, LINE_WORDS)
_HALVES = ir.VectorType(_I32, LINE_WORDS)
_MASK = 2**64 - 1
_HOST_IS_X86 = binding.get_process_triple().split("-", 1)[0] in {"x86_64", "i386", "i686"}

_Value = Any
"""An llvmlite value: the library has no types."""


def _splat(value: int) -> ir.Constant:
    return ir.Constant(_LINE, [value & _MASK] * LINE_WORDS)


def _constant_like(value: _Value, number: int) -> ir.Constant:
    return _splat(number) if value.type == _LINE else ir.Constant(_I64, number & _MASK)


def _emit_multiply(builder: ir.IRBuilder, value: _Value, multiplier: int) -> _Value:
    """Emit a product with a 32-bit constant, modulo 2**64."""
    if value.type != _LINE or _HOST_IS_X86:
        return builder.mul(value, _constant_like(value, multiplier))
    # Elsewhere LLVM takes a 64-bit vector product apart into scalars; products of halves stay vectors.
    factor = ir.Constant(_HALVES, [multiplier] * LINE_WORDS)
    low, high = (builder.trunc(half, _HALVES) for half in (value, builder.lshr(value, _splat(32))))
    low_product = builder.mul(builder.zext(low, _LINE), builder.zext(factor, _LINE))
    return builder.add(low_product, builder.shl(builder.zext(builder.mul(high, factor), _LINE), _splat(32)))


def emit_mix(builder: ir.IRBuilder, keyed: _Value) -> _Value:
    """Emit `mix` of the checksum definition for a word or a line of words."""
    for shift, multiplier in ((FIRST_SHIFT, FIRST_MULTIPLIER), (SECOND_SHIFT, SECOND_MULTIPLIER)):
        keyed = builder.xor(keyed, builder.lshr(keyed, _constant_like(keyed, shift)))
        keyed = _emit_multiply(builder, keyed, multiplier)
    return builder.xor(keyed, builder.lshr(keyed, _constant_like(keyed, LAST_SHIFT)))


def _emit_line_keys(builder: ir.IRBuilder, first_word_index: _Value) -> _Value:
    """Emit key(i) for the eight words from `first_word_index` on."""
    first = builder.mul(builder.add(first_word_index, ir.Constant(_I64, 1)), ir.Constant(_I64, KEY_STEP))
    keys = ir.Constant(_LINE, ir.Undefined)
    for lane in range(LINE_WORDS):
        lane_key = builder.add(first, ir.Constant(_I64, lane * KEY_STEP & _MASK))
        keys = builder.insert_element(keys, lane_key, ir.Constant(_I32, lane))
    return keys


def _emit_lane_sum(builder: ir.IRBuilder, line: _Value) -> _Value:
    total = builder.extract_element(line, ir.Constant(_I32, 0))
    for lane in range(1, LINE_WORDS):
        total = builder.add(total, builder.extract_element(line, ir.Constant(_I32, lane)))
    return total


def _emit_store(builder: ir.IRBuilder, line: _Value, address: _Value, *, non_temporal: bool) -> None:
    pointer = builder.inttoptr(address, _LINE.as_pointer())
    # The alignment is a promise to LLVM, and a non-temporal store faults where it is broken.
    store = builder.store(line, pointer, align=LINE_BYTES if non_temporal else 1)
    if non_temporal:
        one = builder.module.add_metadata([ir.Constant(_I32, 1)])
        store.set_metadata("nontemporal", one)


def _emit_prefetch(builder: ir.IRBuilder, address: _Value, lines: int) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    for_reading, keep_in_all_caches, data = _I32(0), _I32(3), _I32(1)
    for k in range(lines):
        pointer = builder.inttoptr(builder.add(address, ir.Constant(_I64, k * LINE_BYTES)), _I8.as_pointer())
        builder.call(prefetch, [pointer, for_reading, keep_in_all_caches, data])


def _emit_lines(
    builder: ir.IRBuilder,
    destination: _Value | None,
    source: _Value,
    line_count: _Value,
    first_word_index: _Value | None,
    ahead: _Value | None,
    *,
    lines_per_step: int,
    non_temporal: bool,
) -> _Value:
    """Emit a loop over `line_count` lines, a multiple of `lines_per_step`; return the raw sum or a zero.

    Stores are left out without a destination, sums without a word index. With `ahead`, each line read also
    prefetches the line at the same distance from that address, which need not be mapped.
    """
    zero = ir.Constant(_I64, 0)
    entry = builder.block
    summed = first_word_index is not None
    keys_at_start = _emit_line_keys(builder, first_word_index) if summed else None
    header = builder.append_basic_block("lines")
    body = builder.append_basic_block("step")
    done = builder.append_basic_block("done")
    builder.branch(header)

    builder.position_at_end(header)
    line = builder.phi(_I64)
    line.add_incoming(zero, entry)
    lane_sums, keys = (builder.phi(_LINE), builder.phi(_LINE)) if summed else (None, None)
    if lane_sums is not None and keys is not None:
        lane_sums.add_incoming(_splat(0), entry)
        keys.add_incoming(keys_at_start, entry)
    builder.cbranch(builder.icmp_unsigned("<", line, line_count), body, done)

    builder.position_at_end(body)
    offset = builder.mul(line, ir.Constant(_I64, LINE_BYTES))
    read_at = builder.add(source, offset)
    if ahead is not None:
        _emit_prefetch(builder, builder.add(ahead, offset), lines_per_step)
    loaded = [
        builder.load(
            builder.inttoptr(builder.add(read_at, ir.Constant(_I64, k * LINE_BYTES)), _LINE.as_pointer()),
            align=1,
        )
        for k in range(lines_per_step)
    ]
    if destination is not None:
        write_at = builder.add(destination, offset)
        for k, words in enumerate(loaded):
            target = builder.add(write_at, ir.Constant(_I64, k * LINE_BYTES))
            _emit_store(builder, words, target, non_temporal=non_temporal)
    if lane_sums is not None and keys is not None:
        step_sums = lane_sums
        for k, words in enumerate(loaded):
            keyed = builder.add(words, builder.add(keys, _splat(k * LINE_WORDS * KEY_STEP)))
            step_sums = builder.add(step_sums, emit_mix(builder, keyed))
        lane_sums.add_incoming(step_sums, body)
        keys.add_incoming(builder.add(keys, _splat(lines_per_step * LINE_WORDS * KEY_STEP)), body)
    line.add_incoming(builder.add(line, ir.Constant(_I64, lines_per_step)), body)
    builder.branch(header)

    builder.position_at_end(done)
    return zero if lane_sums is None else _emit_lane_sum(builder, lane_sums)


def _emit_unrolled(
    builder: ir.IRBuilder,
    destination: _Value | None,
    source: _Value,
    line_count: _Value,
    first_word_index: _Value | None,
    ahead: _Value | None,
    *,
    non_temporal: bool,
) -> _Value:
    """Emit the loop in steps of `UNROLL` lines and the rest line by line; return the raw sum or a zero."""
    rest = builder.urem(line_count, ir.Constant(_I64, UNROLL))
    main = builder.sub(line_count, rest)
    total = _emit_lines(
        builder,
        destination,
        source,
        main,
        first_word_index,
        ahead,
        lines_per_step=UNROLL,
        non_temporal=non_temporal,
    )
    done_bytes = builder.mul(main, ir.Constant(_I64, LINE_BYTES))
    rest_destination = None if destination is None else builder.add(destination, done_bytes)
    rest_word = (
        None
        if first_word_index is None
        else builder.add(first_word_index, builder.mul(main, ir.Constant(_I64, LINE_WORDS)))
    )
    rest_total = _emit_lines(
        builder,
        rest_destination,
        builder.add(source, done_bytes),
        rest,
        rest_word,
        None if ahead is None else builder.add(ahead, done_bytes),
        lines_per_step=1,
        non_temporal=non_temporal,
    )
    return builder.add(total, rest_total)


def _emit_stream_lines(
    builder: ir.IRBuilder, destination: _Value, source: _Value, line_count: _Value, ahead: _Value
) -> _Value:
    return _emit_unrolled(builder, destination, source, line_count, None, ahead, non_temporal=True)


def _emit_sum_lines(
    builder: ir.IRBuilder, source: _Value, line_count: _Value, first_word_index: _Value
) -> _Value:
    return _emit_unrolled(builder, None, source, line_count, first_word_index, None, non_temporal=False)


def _emit_mix_word(builder: ir.IRBuilder, word: _Value, word_index: _Value) -> _Value:
    key = builder.mul(builder.add(word_index, ir.Constant(_I64, 1)), ir.Constant(_I64, KEY_STEP))
    return emit_mix(builder, builder.add(word, key))


def _emit_copy_bytes(builder: ir.IRBuilder, destination: _Value, source: _Value, length: _Value) -> None:
    target, origin = (builder.inttoptr(address, _I8.as_pointer()) for address in (destination, source))
    cgutils.raw_memcpy(builder, target, origin, length, 1)


def _emit_load_word(builder: ir.IRBuilder, address: _Value) -> _Value:
    return builder.load(builder.inttoptr(address, _I64.as_pointer()), align=1)


def _emit_store_word(builder: ir.IRBuilder, address: _Value, word: _Value) -> None:
    builder.store(word, builder.inttoptr(address, _I64.as_pointer()), align=1)


def _emit_load_byte(builder: ir.IRBuilder, address: _Value) -> _Value:
    return builder.zext(builder.load(builder.inttoptr(address, _I8.as_pointer())), _I64)


def _emit_store_byte(builder: ir.IRBuilder, address: _Value, byte: _Value) -> None:
    builder.store(builder.trunc(byte, _I8), builder.inttoptr(address, _I8.as_pointer()))


def _emit_load_atomic(builder: ir.IRBuilder, address: _Value) -> _Value:
    return builder.load_atomic(builder.inttoptr(address, _I64.as_pointer()), "acquire", 8)


def _emit_fence_stores(builder: ir.IRBuilder) -> None:
    # A language-level fence does not order x86's non-temporal stores; sfence does.
    if _HOST_IS_X86:
        builder.fence("release")
        sfence_type = ir.FunctionType(ir.VoidType(), [])
        builder.call(cgutils.get_or_insert_function(builder.module, sfence_type, "llvm.x86.sse.sfence"), [])
    else:
        builder.fence("seq_cst")


def _define(emit: Callable[..., _Value], result: Any, parameters: int) -> Any:
    """Make an emitter of LLVM code callable from compiled functions; all its parameters are uint64."""

    def codegen(context: Any, builder: ir.IRBuilder, _signature: Any, arguments: list[_Value]) -> _Value:
        value = emit(builder, *arguments)
        return context.get_dummy_value() if result is types.void else value

    signature = result(*[types.uint64] * parameters)
    # Numba reads the number of parameters from the function's own, so one is written for each.
    by_parameters: tuple[Callable[..., Any], ...] = (
        lambda _context: (signature, codegen),
        lambda _context, _a: (signature, codegen),
        lambda _context, _a, _b: (signature, codegen),
        lambda _context, _a, _b, _c: (signature, codegen),
        lambda _context, _a, _b, _c, _d: (signature, codegen),
        lambda _context, _a, _b, _c, _d, _e: (signature, codegen),
    )
    return intrinsic(by_parameters[parameters])


copy_bytes = _define(_emit_copy_bytes, types.void, 3)
"""(destination, source, bytes): the platform's memcpy, any alignment."""
stream_lines = _define(_emit_stream_lines, types.void, 4)
"""(destination, source, lines, ahead): copy with non-temporal stores; the destination is a multiple of 64.

While it copies it prefetches as many lines from `ahead`, any address.
"""
stream_sum_lines = _define(partial(_emit_unrolled, non_temporal=True), types.uint64, 5)
"""(destination, source, lines, first word index, ahead) -> raw sum: the same with the checksum fused."""
store_sum_lines = _define(partial(_emit_unrolled, non_temporal=False), types.uint64, 5)
"""(destination, source, lines, first word index, ahead) -> raw sum: with ordinary stores, any alignment."""
sum_lines = _define(_emit_sum_lines, types.uint64, 3)
"""(source, lines, first word index) -> raw sum: read only."""
prefetch_line = _define(lambda builder, address: _emit_prefetch(builder, address, 1), types.void, 1)
"""(address): ask for one line, which brings its page's translation too; the address need not be mapped."""
mix_word = _define(_emit_mix_word, types.uint64, 2)
"""(word, index) -> f(word, index) of the checksum definition."""
load_unaligned_word = _define(_emit_load_word, types.uint64, 1)
"""(address) -> the 8 bytes there, any alignment."""
store_unaligned_word = _define(_emit_store_word, types.void, 2)
"""(address, word): store 8 bytes, any alignment."""
load_byte = _define(_emit_load_byte, types.uint64, 1)
"""(address) -> the byte there."""
store_byte = _define(_emit_store_byte, types.void, 2)
"""(address, byte): store the low 8 bits."""
load_atomic_word = _define(_emit_load_atomic, types.uint64, 1)
"""(address) -> the aligned word there, in one access with acquire order."""
fence_acquire = _define(lambda builder: builder.fence("acquire"), types.void, 0)
"""Order earlier reads before later reads and writes."""
fence_stores = _define(_emit_fence_stores, types.void, 0)
"""Order this thread's earlier stores, non-temporal ones included, before later ones."""
