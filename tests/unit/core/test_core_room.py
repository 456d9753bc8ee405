"""Whether there is room for L1, asked before anything is created."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from appliance.errors import ArenaTooSmall
from appliance.protocol.arena_layout import SegmentLayout
from appliance.server import room
from appliance.server.room import check_room, memory_limit

MIB = 1 << 20


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def limit(tmp_path: Path, cgroup: str, files: dict[str, str]) -> int | None:
    file = tmp_path / "cgroup"
    file.write_text(cgroup)
    return memory_limit(tree(tmp_path / "fs", files), file)


V1 = "12:cpuset:/x\n5:cpu,cpuacct:/a\n4:memory:/docker/abc\n1:name=systemd:/docker/abc\n"
UNLIMITED_V1 = "9223372036854771712\n"


@pytest.mark.parametrize(
    "cgroup, files, expected",
    [
        ("0::/\n", {"memory.max": "1048576\n"}, MIB),
        ("0::/\n", {"memory.max": "max\n"}, None),
        ("0::/\n", {}, None),
        ("0::/user/app\n", {"user/app/memory.max": "max\n", "user/memory.max": "4096\n"}, 4096),
        ("0::/user/app\n", {"user/app/memory.max": "8192\n", "user/memory.max": "4096\n"}, 4096),
        ("0::/user/app\n", {"user/app/memory.max": "2048\n", "user/memory.max": "4096\n"}, 2048),
        (V1, {"memory/docker/abc/memory.limit_in_bytes": "1048576\n"}, MIB),
        (V1, {"memory/docker/abc/memory.limit_in_bytes": UNLIMITED_V1}, None),
        (
            V1,
            {
                "memory/memory.limit_in_bytes": "4096\n",
                "memory/docker/abc/memory.limit_in_bytes": UNLIMITED_V1,
            },
            4096,
        ),
        (V1, {"memory.max": "5\n", "cpuset/x/memory.limit_in_bytes": "7\n"}, None),
        (V1 + "0::/\n", {"memory.max": "max\n", "memory/docker/abc/memory.limit_in_bytes": "4096\n"}, 4096),
        ("0::/\n", {"memory.max": "not a number\n"}, None),
        ("", {"memory.max": "5\n"}, None),
    ],
)
def test_memory_limit_of_a_cgroup(tmp_path, cgroup, files, expected):
    assert limit(tmp_path, cgroup, files) == expected


def test_no_cgroups_no_limit(tmp_path):
    assert memory_limit(tmp_path, tmp_path / "absent") is None


def test_enough_room_creates_nothing(tmp_path):
    check_room(tmp_path / "new" / "arena", SegmentLayout(16, 4096))
    assert list(tmp_path.iterdir()) == []


def test_a_mount_that_can_never_hold_it(tmp_path):
    with pytest.raises(ArenaTooSmall, match="GiB free") as caught:
        check_room(tmp_path / "arena", SegmentLayout(1 << 30, 1 << 20))
    assert caught.value.details["asked_bytes"] > caught.value.details["free_bytes"]
    assert "--l1-size-gb" in caught.value.remedy
    assert not (tmp_path / "arena").exists()


def test_a_cgroup_that_is_smaller(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "memory_limit", lambda: MIB)
    with pytest.raises(ArenaTooSmall, match="cgroup") as caught:
        check_room(tmp_path, SegmentLayout(16, 4096))
    assert caught.value.details["limit_bytes"] == MIB


@pytest.fixture
def small_mount(tmp_path):
    mount = tmp_path / "mount"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mount)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("this process may not mount a tmpfs")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_small_mount_and_what_an_earlier_arena_takes_there(small_mount):
    with pytest.raises(ArenaTooSmall):
        check_room(small_mount, SegmentLayout(2048, 4096))
    fits = SegmentLayout(1024, 4096)
    check_room(small_mount, fits)
    old = small_mount / "segment-old-0000.arena"
    descriptor = os.open(old, os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(descriptor, 0, 5 * MIB)
    os.close(descriptor)
    check_room(small_mount, fits)
    old.rename(small_mount / "somebody-elses")
    with pytest.raises(ArenaTooSmall):
        check_room(small_mount, fits)
