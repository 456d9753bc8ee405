import numpy as np
import pytest

from kernels import CHECKSUM_ALGORITHM, finish, load_backend, reference_backend
from kernels.checksum import mixed_words

MASK = 2**64 - 1


@pytest.fixture(params=["numba", "numpy"])
def backend(request):
    chosen = load_backend() if request.param == "numba" else reference_backend()
    assert chosen.name == request.param
    return chosen


def plain_mix(word, index):
    """The definition in plain integers, apart from the numpy and LLVM forms."""
    x = (word + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ x >> 32) * 0xD6E8FEB9) & MASK
    x = ((x ^ x >> 29) * 0xCA9B0A75) & MASK
    return x ^ x >> 32


def checksum(backend, data, runs=None):
    return int(finish(backend.checksum_bytes(data, runs or [(0, len(data))]), len(data))[0])


def test_name_is_pinned():
    assert CHECKSUM_ALGORITHM == "pw64/1"


def sample(length):
    return bytes((index * 167 + 13) & 0xFF for index in range(length))


VECTORS = [
    (b"", 0x0000000000000000, 0xC7D3552D73A5B57E),
    (bytes(1), 0xE65795539EAC1FD4, 0xA438F3C70A739D31),
    (bytes(8), 0xE65795539EAC1FD4, 0x9072326371D639AB),
    (bytes(4096), 0x1BDFA14308297242, 0x067C6ABA86CCC76C),
    (b"\xff" * 64, 0xA3B759006959559A, 0x02191A4A72E6F0B1),
    (b"Pagewarden", 0x3615E8D241E27F52, 0x2B92B67A847988F9),
    (sample(63), 0xEDB5796D01A1922F, 0x8D4A70BAC1CCFDC0),
    (sample(4096), 0x4CE3C66DFB4069FB, 0xEAF10EF1BCB63F92),
    (sample(5000), 0xB767DC79FF3590B7, 0x05E94CF77E8256D7),
]


@pytest.mark.parametrize(("data", "raw", "final"), VECTORS)
def test_vectors_are_pinned(backend, data, raw, final):
    assert backend.checksum_bytes(data, [(0, len(data))]) == raw
    assert int(finish(raw, len(data))[0]) == final


def test_padding_vector_is_pinned(backend):
    runs = [(0, 100), (128, 5), (4096, 904)]
    assert backend.checksum_bytes(sample(5000), runs) == 0x1E1828361914A59E
    dirty = bytearray(sample(5000))
    dirty[100:128], dirty[133:4096] = bytes(28), bytes(4096 - 133)
    assert backend.checksum_bytes(dirty, runs) == 0x1E1828361914A59E


@pytest.mark.parametrize("index", [0, 1, 7, 2**31, 2**61 - 9])
def test_numpy_form_is_the_definition(index):
    words = np.array([0, 1, MASK, 0x0123456789ABCDEF, 1 << 63], dtype=np.uint64)
    assert mixed_words(words, index).tolist() == [plain_mix(int(w), index + k) for k, w in enumerate(words)]


@pytest.mark.parametrize("length", [1, 7, 8, 9, 63, 64, 65, 130, 331])
@pytest.mark.parametrize("kind", ["zeros", "sample"])
def test_every_single_bit_flip_is_seen(backend, length, kind):
    data = bytearray(length) if kind == "zeros" else bytearray(sample(length))
    seen = {checksum(backend, data)}
    for position in range(length * 8):
        data[position // 8] ^= 1 << position % 8
        seen.add(checksum(backend, data))
        data[position // 8] ^= 1 << position % 8
    # All of them differ from the original, and from each other.
    assert len(seen) == length * 8 + 1


def test_a_word_maps_one_to_one_at_each_position():
    """Invert `mix`: two words with one value at a position cannot exist where every value leads back."""
    inverse_first, inverse_second = pow(0xD6E8FEB9, -1, 2**64), pow(0xCA9B0A75, -1, 2**64)

    def undo(value, index):
        value ^= value >> 32
        value = value * inverse_second & MASK
        value ^= value >> 29 ^ value >> 58
        value = value * inverse_first & MASK
        value ^= value >> 32
        return (value - (index + 1) * 0x9E3779B97F4A7C15) & MASK

    words = np.random.default_rng(5).integers(0, 2**64, 2000, dtype=np.uint64)
    mixed = mixed_words(words, 123)
    assert [undo(int(value), 123 + k) for k, value in enumerate(mixed)] == words.tolist()


PAGE = 4096


@pytest.fixture
def pages():
    return np.random.default_rng(1).integers(0, 256, (8, PAGE), dtype=np.uint8)


def test_swapped_words_are_seen_even_when_they_differ_in_one_bit(backend):
    for bit in range(64):
        words = np.random.default_rng(bit).integers(0, 2**64, 64, dtype=np.uint64)
        words[17] = words[40] ^ np.uint64(1 << bit)
        swapped = words.copy()
        swapped[[17, 40]] = swapped[[40, 17]]
        assert checksum(backend, words.tobytes()) != checksum(backend, swapped.tobytes())


def test_swapped_shifted_zeroed_and_foreign_pages_are_seen(backend, pages):
    original = checksum(backend, pages.tobytes())
    swapped = pages[[0, 1, 5, 3, 4, 2, 6, 7]]
    shifted = np.roll(pages, 1, axis=0)
    by_a_word = np.roll(pages.ravel(), 8)
    zeroed, repeated = pages.copy(), pages.copy()
    zeroed[3] = 0
    repeated[3] = pages[4]
    sums = [
        checksum(backend, changed.tobytes()) for changed in (swapped, shifted, by_a_word, zeroed, repeated)
    ]
    assert len({original, *sums}) == 6


def test_a_lost_page_of_zeros_is_seen_in_the_raw_sum(backend):
    zeros = bytes(8 * PAGE)
    runs = [(page * PAGE, PAGE) for page in range(8)]
    whole = backend.checksum_bytes(zeros, runs)
    without_one = {backend.checksum_bytes(zeros, runs[:page] + runs[page + 1 :]) for page in range(8)}
    assert len(without_one | {whole}) == 9


def test_length_is_part_of_the_checksum():
    lengths = np.arange(100_000, dtype=np.uint64)
    assert len(np.unique(finish(np.uint64(12345), lengths))) == len(lengths)


def test_an_all_zero_stream_has_a_nonzero_checksum():
    words = np.zeros(1 << 21, dtype=np.uint64)
    raw = np.cumsum(mixed_words(words, 0), dtype=np.uint64)
    whole = np.arange(8, 8 * len(words) + 8, 8, dtype=np.uint64)
    for short in range(8):
        assert finish(raw, whole - np.uint64(short)).all()


@pytest.mark.parametrize("runs", [[(4, 8)], [(0, 65)], [(64, 1)], [(-8, 8)], [(0, -1)]])
def test_runs_outside_the_buffer_are_refused(backend, runs):
    with pytest.raises(ValueError, match="run"):
        backend.checksum_bytes(bytes(64), runs)
