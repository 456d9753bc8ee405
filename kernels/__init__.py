"""Page copy and checksum: spans, page geometry, planning, and the backends that move the bytes."""

from kernels.backend import Backend, load_backend, reference_backend
from kernels.checksum import CHECKSUM_ALGORITHM, finish
from kernels.pages import STREAM_LAYOUT, GroupPages, PageMap, StreamRuns, kernel_block_runs
from kernels.plan import ExtentError, extents_needed, plan_object
from kernels.spans import Direction, Spans

__all__ = [
    "CHECKSUM_ALGORITHM",
    "STREAM_LAYOUT",
    "Backend",
    "Direction",
    "ExtentError",
    "GroupPages",
    "PageMap",
    "Spans",
    "StreamRuns",
    "extents_needed",
    "finish",
    "kernel_block_runs",
    "load_backend",
    "plan_object",
    "reference_backend",
]
