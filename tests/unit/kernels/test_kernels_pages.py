import numpy as np
import pytest

from kernels import GroupPages, PageMap, Spans, kernel_block_runs
from kernels.pages import StreamRuns
from kernels.reference import memory_view

BF16 = 2


@pytest.mark.parametrize(
    ("shape", "strides", "item_bytes", "block_dimension", "expected"),
    [
        # MLA: one contiguous page per kernel block.
        ((100, 1, 16, 576), (9216, 9216, 576, 1), BF16, 0, (18432, ((0, 18432),))),
        # Recurrent state seen as bytes, the page padded to the group's page size.
        ((50, 1, 1, 268288), (327680, 268288, 268288, 1), 1, 0, (327680, ((0, 268288),))),
        # K and V planes far apart: two runs a block.
        ((2, 40, 16, 4, 64), (40 * 4096, 4096, 256, 64, 1), BF16, 1, (8192, ((0, 8192), (327680, 8192)))),
        # K and V beside each other: one run.
        ((40, 2, 16, 4, 64), (8192, 4096, 256, 64, 1), BF16, 0, (16384, ((0, 16384),))),
        # The same bytes with heads before tokens in memory, tokens before heads in the shape.
        ((40, 2, 16, 4, 64), (8192, 4096, 64, 1024, 1), BF16, 0, (16384, ((0, 16384),))),
        # K and V beside each other, each padded.
        ((40, 2, 100), (512, 256, 1), 1, 0, (512, ((0, 100), (256, 100)))),
        # All layers of a block contiguous: this layer owns a slice of each block.
        ((3, 16, 8), (1000, 8, 1), 4, 0, (4000, ((0, 512),))),
        # Every token padded: a run per token.
        ((3, 4, 8), (40, 10, 1), 1, 0, (40, ((0, 8), (10, 8), (20, 8), (30, 8)))),
        # One block: its stride says nothing.
        ((1, 4, 8), (1, 8, 1), 1, 0, (32, ((0, 32),))),
    ],
)
def test_runs_are_derived_from_shape_and_strides(shape, strides, item_bytes, block_dimension, expected):
    assert kernel_block_runs(shape, strides, item_bytes, block_dimension) == expected


@pytest.mark.parametrize(
    ("shape", "strides", "block_dimension"),
    [
        ((4, 8), (0, 1), 0),
        ((4, 8), (4, 1), 0),
        ((4, 8), (8, -1), 0),
        ((4, 8), (8, 1), 2),
        ((0, 8), (8, 1), 0),
    ],
)
def test_strides_that_describe_no_pages_are_refused(shape, strides, block_dimension):
    with pytest.raises(ValueError, match=r"strides|cache tensor"):
        kernel_block_runs(shape, strides, 1, block_dimension)


def test_wrong_block_dimension_is_refused_rather_than_cut_into_dust():
    with pytest.raises(ValueError, match="block dimension"):
        kernel_block_runs((8, 5000, 64), (64, 512, 1), 1, 0)


@pytest.mark.parametrize("shape", [(40, 2, 6, 10), (2, 40, 6, 10)])
@pytest.mark.parametrize("pad", [0, 3])
def test_runs_address_the_same_bytes_as_numpy_indexing(shape, pad):
    block_dimension = shape.index(40)
    padded = np.zeros((*shape[:3], shape[3] + pad), dtype=np.uint16)
    cache = padded[..., : shape[3]]
    page = PageMap.from_tensor(
        base_address=padded.ctypes.data,
        shape=cache.shape,
        strides=tuple(stride // 2 for stride in cache.strides),
        item_bytes=2,
        block_dimension=block_dimension,
    )
    runs = GroupPages((page,)).stream_runs([17])
    for address, length in zip(runs.engine_address.tolist(), runs.length_bytes.tolist(), strict=True):
        memory_view(address, length)[:] = 0xFF
    expected = np.zeros_like(padded)
    np.moveaxis(expected[..., : shape[3]], block_dimension, 0)[17] = 0xFFFF
    np.testing.assert_array_equal(padded, expected)


def test_manager_block_128_over_kernel_block_64_touches_only_its_own_kernel_blocks(backend):
    guard, fill = 0xA5, 0x11
    kernel_block_bytes = 64 * 8
    cache = np.full((30, kernel_block_bytes + 64), guard, dtype=np.uint8)
    page = PageMap(cache.ctypes.data, 2, cache.strides[0], ((0, kernel_block_bytes),), 30)
    runs = GroupPages((page,)).stream_runs([5, 11])
    arena = np.full(8192, fill, dtype=np.uint8)
    backend.load(runs, arena)
    expected = np.full_like(cache, guard)
    expected[[10, 11, 22, 23], :kernel_block_bytes] = fill
    np.testing.assert_array_equal(cache, expected)


@pytest.fixture(params=["numba", "numpy"])
def backend(request):
    from kernels import Direction, load_backend, plan_object, reference_backend

    chosen = load_backend() if request.param == "numba" else reference_backend()
    assert chosen.name == request.param

    class Loader:
        @staticmethod
        def load(runs: StreamRuns, arena: np.ndarray) -> None:
            start = -arena.ctypes.data % 64
            spans: Spans = plan_object(
                runs, [(0, 1)], extent_bytes=4096, data_base_address=arena.ctypes.data + start, extent_limit=1
            )
            chosen.copy_spans(spans, Direction.LOAD)

    return Loader


def test_stream_is_layer_major_and_every_run_starts_on_a_line():
    first = PageMap(1 << 20, 2, 1000, ((0, 100), (500, 30)), 40)
    second = PageMap(2 << 20, 1, 5000, ((8, 4100),), 20)
    group = GroupPages.from_layers({"layers.10": second, "layers.1": first})
    runs = group.stream_runs([7, 3])
    base, other = 1 << 20, 2 << 20
    assert runs.engine_address.tolist() == [
        base + 14000, base + 14500, base + 15000, base + 15500, base + 6000, base + 6500, base + 7000, base + 7500,
        other + 35008, other + 15008,
    ]  # fmt: skip
    assert runs.length_bytes.tolist() == [100, 30, 100, 30, 100, 30, 100, 30, 4100, 4100]
    assert runs.stream_offset.tolist() == [0, 128, 192, 320, 384, 512, 576, 704, 768, 4928]
    assert runs.stream_bytes == group.object_stream_bytes(2) == 4928 + 4100
    assert runs.total_bytes == 4 * 130 + 8200


def test_pieces_that_continue_each_other_are_joined():
    page = PageMap(4096, 4, 640, ((0, 640),), 80)
    runs = GroupPages((page,)).stream_runs([2, 3, 9])
    assert runs.engine_address.tolist() == [4096 + 8 * 640, 4096 + 36 * 640]
    assert runs.length_bytes.tolist() == [8 * 640, 4 * 640]
    assert runs.stream_offset.tolist() == [0, 8 * 640]


def test_padding_is_not_joined_into_a_piece():
    page = PageMap(4096, 2, 640, ((0, 630),), 80)
    assert GroupPages((page,)).stream_runs([1]).length_bytes.tolist() == [630, 630]


@pytest.mark.parametrize("ids", [[], [20], [3, 20], [-1], [1.5], [[1, 2]]])
def test_block_ids_that_are_no_blocks_of_the_cache_are_refused(ids):
    group = GroupPages((PageMap(4096, 2, 640, ((0, 640),), 41),))
    assert group.block_count == 20
    with pytest.raises(ValueError, match="block"):
        group.stream_runs(ids)


@pytest.mark.parametrize(
    "numbers",
    [
        (0, 1, 64, ((0, 64),), 1),
        (64, 0, 64, ((0, 64),), 1),
        (64, 1, 0, ((0, 64),), 1),
        (64, 1, 64, (), 1),
        (64, 1, 64, ((0, 40), (32, 8)), 1),
        (64, 1, 64, ((0, 0),), 1),
        (64, 1, 64, ((0, 64),), 0),
    ],
)
def test_page_maps_that_describe_no_page_are_refused(numbers):
    with pytest.raises(ValueError, match=r"page|runs"):
        PageMap(*numbers)
