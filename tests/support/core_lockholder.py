"""A process that holds attach locks: ``python -m tests.support.core_lockholder DIRECTORY ATTACH_ID...``.

It prints one line once it holds them all. With ``--fork`` it leaves a child alive that has inherited everything. It ends
with its standard input.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from appliance.protocol.arena_layout import lock_name
from appliance.protocol.liveness import take_lock

REPOSITORY = Path(__file__).parents[2]


@contextmanager
def lock_holder(directory: Path, *attach_ids: int, fork: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A process that holds these locks until the block ends or somebody kills it."""
    arguments = [str(directory), *(["--fork"] if fork else []), *map(str, attach_ids)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.core_lockholder", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "holding\n"
        yield process
    finally:
        process.kill()
        process.wait(timeout=30)
        process.stdin.close()
        process.stdout.close()


def main() -> None:
    directory, *rest = sys.argv[1:]
    for attach_id in [int(each) for each in rest if each != "--fork"]:
        if take_lock(Path(directory) / lock_name(attach_id)) is None:
            raise SystemExit("the lock is taken")
    if "--fork" in rest and os.fork() == 0:
        os.close(1)
        os.read(0, 1)
        os._exit(0)
    print("holding", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
