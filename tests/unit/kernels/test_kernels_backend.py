"""What can go wrong around the compiled code: its cache, its absence, its fences and its parallel use."""

import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import kernels
from kernels import Direction, Spans, cpu, load_backend, reference_backend

PACKAGE = Path(kernels.__file__).parent
SHOW = "import kernels; b = kernels.load_backend(); print(b.name, b.checksum_bytes(bytes(8), [(0, 8)]))"


@pytest.fixture(params=["numba", "numpy"])
def backend(request):
    chosen = load_backend() if request.param == "numba" else reference_backend()
    assert chosen.name == request.param
    return chosen


def run(directory, code, **environment):
    keep = {key: value for key, value in os.environ.items() if not key.startswith("NUMBA")}
    keep.update(environment)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        check=False,
        cwd=directory,
        env=keep,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.fixture
def package_copy(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_without_numba_the_reference_runs(package_copy):
    shown = run(package_copy, "import sys; sys.modules['numba'] = None; " + SHOW)
    assert shown == ["numpy", str(0xE65795539EAC1FD4)]


def test_without_a_place_for_a_cache_it_still_compiles(package_copy):
    # Files where numba wants folders: a denial that holds for root too.
    (package_copy / "kernels" / "__pycache__").write_text("not a folder")
    (package_copy / "home").write_text("not a folder")
    home = str(package_copy / "home")
    shown = run(package_copy, SHOW, HOME=home, XDG_CACHE_HOME=home, PYTHONDONTWRITEBYTECODE="1")
    assert shown == ["numba", str(0xE65795539EAC1FD4)]


def test_cached_code_is_used_again_and_never_after_its_source_changed(package_copy):
    hits = "; from kernels import cpu; print(sum(cpu._sum_batch.stats.cache_hits.values()))"
    assert run(package_copy, SHOW + hits) == ["numba", str(0xE65795539EAC1FD4), "0"]
    assert run(package_copy, SHOW + hits) == ["numba", str(0xE65795539EAC1FD4), "1"]
    definition = package_copy / "kernels" / "checksum.py"
    definition.write_text(definition.read_text().replace("0xD6E8FEB9", "0xD6E8FEBB"))
    _, changed, loaded = run(package_copy, SHOW + hits)
    assert (changed != str(0xE65795539EAC1FD4), loaded) == (True, "0")


@pytest.mark.skipif(platform.machine() not in {"x86_64", "AMD64"}, reason="looks for x86 instructions")
def test_machine_code_streams_and_fences():
    for cached, body in ((cpu._copy_batch, cpu._copy_body), (cpu._copy_sum_batch, cpu._copy_sum_body)):
        # Compiled afresh: numba shows no code that came from its cache.
        (signature,) = cached.nopython_signatures
        (assembly,) = cpu._compiled(signature, body, cache=False).inspect_asm().values()
        assert "movnt" in assembly, "no non-temporal store"
        assert "sfence" in assembly, "stores are not fenced by the thread that made them"
        assert cached.targetoptions["nogil"]


def test_load_word_reads_an_aligned_word_and_refuses_another(backend):
    words = np.array([1, 0xFEDCBA9876543210], dtype=np.uint64)
    assert backend.load_word(words.ctypes.data + 8) == 0xFEDCBA9876543210
    backend.acquire_fence()
    for address in (0, -8, words.ctypes.data + 4):
        with pytest.raises(ValueError, match="aligned word"):
            backend.load_word(address)


def test_sums_need_a_place_for_every_object(backend):
    memory = np.zeros(256, dtype=np.uint8)
    spans = Spans([memory.ctypes.data], [memory.ctypes.data + 128], [8], [0], [2])
    assert backend.copy_spans_checksummed(spans, Direction.STORE, 4).tolist() == [0, 0, 0xE65795539EAC1FD4, 0]
    with pytest.raises(ValueError, match="3 objects for 2 sums"):
        backend.copy_spans_checksummed(spans, Direction.STORE, 2)


def test_no_spans_copy_nothing(backend):
    backend.copy_spans(Spans.empty(), Direction.LOAD)
    assert backend.copy_spans_checksummed(Spans.empty(), Direction.LOAD, 2).tolist() == [0, 0]


def test_sums_of_parts_copied_on_several_threads_add_up(backend):
    count, size = 16, 70_000
    engine = np.random.default_rng(2).integers(0, 256, (count, size), dtype=np.uint8)
    arena = np.zeros((count, size), dtype=np.uint8)
    step = np.arange(count, dtype=np.uint64)
    spans = Spans(
        step * np.uint64(size) + np.uint64(engine.ctypes.data),
        step * np.uint64(size) + np.uint64(arena.ctypes.data),
        np.full(count, size, dtype=np.uint64),
        step * np.uint64(size // 64 * 64 + 64),
        (step % np.uint64(3)).astype(np.int32),
    )
    with ThreadPoolExecutor(4) as pool:
        parts = pool.map(
            lambda start: backend.copy_spans_checksummed(spans.rows(start, start + 4), Direction.STORE, 3),
            range(0, count, 4),
        )
        total = np.sum(list(parts), axis=0, dtype=np.uint64)
    np.testing.assert_array_equal(arena, engine)
    assert total.tolist() == backend.copy_spans_checksummed(spans, Direction.STORE, 3).tolist()
