"""The object checksum `pw64/1`: what it is, what it catches, and its numpy form.

Definition
----------
All arithmetic is on unsigned 64-bit integers modulo 2**64; `>>` fills with zeros.

An object's stream is read as runs. Each run starts at a multiple of 8 bytes and covers little-endian 8-byte
words; the last word of a run is filled with zero bytes when the run ends inside it. Padding between runs is
not read. With i the word's index in the stream (stream offset in bytes / 8):

    key(i)  = (i + 1) * 0x9E3779B97F4A7C15
    mix(x)  : x ^= x >> 32;  x *= 0xD6E8FEB9;  x ^= x >> 29;  x *= 0xCA9B0A75;  x ^= x >> 32
    f(w, i) = mix(w + key(i))
    raw     = sum of f(w, i) over all words

    finish(raw, n) = scramble(raw ^ scramble(n + 0x2545F4914F6CDD1D)), n = stream length in bytes
    scramble(x)    : x ^= x >> 30;  x *= 0xBF58476D1CE4E5B9;  x ^= x >> 27;  x *= 0x94D049BB133111EB;
                     x ^= x >> 31

The sum is commutative: spans may be processed in any order, split at any word and on any number of threads or
devices, and their raw sums added. Both multipliers of `mix` fit in 32 bits, so that a product is two
32x32->64 multiplies on machines without a wide 64-bit vector multiply.

What it catches
---------------
- Certain: any change confined to one word, so every single-bit flip and every burst inside one aligned word.
  `mix` is built from invertible steps only, hence f(., i) is a bijection for each i, hence `raw` differs;
  `finish` is a bijection of `raw` for a fixed length.
- Certain: the same `raw` with another length gives another checksum (a bijection of the length for a fixed raw).
- Almost certain: changes in several words, swapped words or pages, shifted or missing pages, zeroed pages, pages of
  another position. Were `mix` a random function, each would escape with probability 2**-64. The most regular event
  known, the same bit flipped in two words, was sampled: no bit cancelled in more than one of 2**40 pairs.
  Zero words are not special: f(0, i) is zero for no i below 2**64 - 1, because mix(0) = 0 only and key(i) is not
  zero there, so losing a word of zeros certainly changes `raw` and losing a page of them does like any page.
- Not at all: an adversary. It is no authentication code.

An all-zero stream of nonzero length has a nonzero checksum (tested for every length up to 16 MiB, and
probability 2**-64 for a longer one).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

CHECKSUM_ALGORITHM = "pw64/1"
"""Name of the definition above; another definition is another name, and the name is part of the fingerprint."""

KEY_STEP = 0x9E3779B97F4A7C15
FIRST_SHIFT, FIRST_MULTIPLIER = 32, 0xD6E8FEB9
SECOND_SHIFT, SECOND_MULTIPLIER = 29, 0xCA9B0A75
LAST_SHIFT = 32
LENGTH_OFFSET = 0x2545F4914F6CDD1D
_SCRAMBLE_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SCRAMBLE_SECOND = np.uint64(0x94D049BB133111EB)


def mixed_words(words: NDArray[np.uint64], first_word_index: int) -> NDArray[np.uint64]:
    """Return f(w, i) for consecutive words of a stream, the first at `first_word_index`."""
    # From (index mod 2**64) on, so that numpy's checked scalar arithmetic stays out of the way.
    key = np.arange(1, len(words) + 1, dtype=np.uint64)
    key += np.uint64(first_word_index)
    key *= np.uint64(KEY_STEP)
    key += words
    key ^= key >> np.uint64(FIRST_SHIFT)
    key *= np.uint64(FIRST_MULTIPLIER)
    key ^= key >> np.uint64(SECOND_SHIFT)
    key *= np.uint64(SECOND_MULTIPLIER)
    key ^= key >> np.uint64(LAST_SHIFT)
    return key


def raw_sum(stream_bytes: NDArray[np.uint8], stream_offset: int) -> int:
    """Return the raw sum of one contiguous piece of a stream, a vector of bytes starting at `stream_offset`."""
    whole = len(stream_bytes) // 8 * 8
    first_word = stream_offset // 8
    words = stream_bytes[:whole].view("<u8").astype(np.uint64, copy=False)
    total = int(mixed_words(words, first_word).sum(dtype=np.uint64))
    if whole < len(stream_bytes):
        last = np.zeros(8, dtype=np.uint8)
        last[: len(stream_bytes) - whole] = stream_bytes[whole:]
        total += int(mixed_words(last.view("<u8").astype(np.uint64), first_word + whole // 8)[0])
    return total & (2**64 - 1)


def _scramble(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * _SCRAMBLE_FIRST
    values = (values ^ (values >> np.uint64(27))) * _SCRAMBLE_SECOND
    return values ^ (values >> np.uint64(31))


def finish(raw_sums: ArrayLike, stream_lengths: ArrayLike) -> NDArray[np.uint64]:
    """Return the checksums of objects from their raw sums and stream lengths in bytes.

    Both arguments are vectors (or scalars) of integers that fit uint64 and broadcast; the result is a vector.
    """
    raw = np.atleast_1d(np.asarray(raw_sums, dtype=np.uint64))
    lengths = np.atleast_1d(np.asarray(stream_lengths, dtype=np.uint64))
    return _scramble(raw ^ _scramble(lengths + np.uint64(LENGTH_OFFSET)))
