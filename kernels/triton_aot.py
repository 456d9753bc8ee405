"""Compile the copy kernel for devices that are not there, and look for the instructions that make it fast.

`python -m kernels.triton_aot` prints a table and fails if a target lacks 128-bit loads or stores. It needs Triton and
no GPU, and must not run under `TRITON_INTERPRET`.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile  # noqa: A004  # its name there

from kernels import triton_copy

SIGNATURE = {"table": "*i64", "stride": "i32", "rows": "i32", "sums": "*i64"}


@dataclass(frozen=True)
class Target:
    """A device to compile for, and how its assembly writes 128-bit accesses of global memory."""

    name: str
    backend: str
    architecture: int | str
    warp_size: int
    assembly: str
    binary: str
    wide_load: str
    wide_store: str
    atomic: str


_NVIDIA = {
    "backend": "cuda",
    "warp_size": 32,
    "assembly": "ptx",
    "binary": "cubin",
    "wide_load": r"\bld\.global(?:\.[\w:]+)*\.(?:v2\.b64|v4\.b32)",
    "wide_store": r"\bst\.global(?:\.[\w:]+)*\.(?:v2\.b64|v4\.b32)",
    "atomic": r"\batom\.global(?:\.[\w:]+)*\.add\.u64",
}
TARGETS = (
    Target(name="sm_90", architecture=90, **_NVIDIA),  # type: ignore[arg-type]
    Target(name="sm_100", architecture=100, **_NVIDIA),  # type: ignore[arg-type]
    Target(
        name="gfx950",
        backend="hip",
        architecture="gfx950",
        warp_size=64,
        assembly="amdgcn",
        binary="hsaco",
        wide_load=r"\bglobal_load_dwordx4\b",
        wide_store=r"\bglobal_store_dwordx4\b",
        atomic=r"\bglobal_atomic_add_x2\b",
    ),
)


@dataclass(frozen=True)
class Compiled:
    """One kernel for one target: its assembly, how large its binary is, and what was found in it."""

    target: Target
    checksummed: bool
    text: str
    binary_bytes: int

    def count(self, pattern: str) -> int:
        """How often an instruction occurs."""
        return len(re.findall(pattern, self.text))

    @property
    def complaints(self) -> list[str]:
        """What this kernel should have and has not."""
        wanted = {"128-bit loads": self.target.wide_load, "128-bit stores": self.target.wide_store}
        if self.checksummed:
            wanted["64-bit atomic adds"] = self.target.atomic
        missing = [f"no {what}" for what, pattern in wanted.items() if not self.count(pattern)]
        return missing if self.binary_bytes else [*missing, "no machine code"]


def compile_for(target: Target, *, checksummed: bool) -> Compiled:
    """Compile the kernel as a launch would. Raises RuntimeError under `TRITON_INTERPRET`."""
    if not hasattr(triton_copy.copy_kernel, "src"):
        raise RuntimeError("TRITON_INTERPRET is set, so there is nothing to compile: unset it")
    constants: dict[str, Any] = {
        "checksummed": checksummed,
        "block_words": triton_copy.BLOCK_WORDS,
        "block_byte_rows": triton_copy.BLOCK_BYTE_ROWS,
    }
    # Both tensors come from torch, which aligns them; a launch finds the same out from the pointers.
    aligned = [["tt.divisibility", 16]]
    source = ASTSource(
        triton_copy.copy_kernel,
        signature={**SIGNATURE, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
        attrs={(0,): aligned, (3,): aligned},
    )
    made = compile(
        source,
        target=GPUTarget(target.backend, target.architecture, target.warp_size),
        options={"num_warps": triton_copy.WARPS},
    )
    return Compiled(target, checksummed, made.asm[target.assembly], len(made.asm[target.binary]))


def main() -> int:
    """Compile everything and report; 1 when something is missing."""
    complaints = 0
    for target in TARGETS:
        for checksummed in (True, False):
            made = compile_for(target, checksummed=checksummed)
            name = f"{target.name} {'with' if checksummed else 'without'} checksum"
            counts = (
                f"{made.count(target.wide_load)} 128-bit loads, {made.count(target.wide_store)} 128-bit stores, "
                f"{made.count(target.atomic)} atomic adds, {made.binary_bytes} bytes of machine code"
            )
            complaints += len(made.complaints)
            sys.stdout.write(f"{name}: {counts}{''.join(f'; {each}' for each in made.complaints)}\n")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
