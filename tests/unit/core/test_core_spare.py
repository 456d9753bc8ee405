"""Memory for a second copy: the mount's room, or less where a cgroup on the way to the root has less left."""

from __future__ import annotations

import os

import pytest

from appliance.server.spare import spare_memory

GIB = 1 << 30


def cgroups(tmp_path, files):
    for name, text in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    file = tmp_path / "cgroup"
    file.write_text("0::/pod/daemon\n")
    return tmp_path / "fs", file


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"pod/daemon/memory.max": "5000\n", "pod/daemon/memory.current": "1200\n"}, 3800),
        (
            {
                "pod/daemon/memory.max": "max\n",
                "pod/daemon/memory.current": "1200\n",
                "pod/memory.max": "9000\n",
                "pod/memory.current": "8999\n",
            },
            1,
        ),
        ({"pod/daemon/memory.max": "5000\n", "pod/daemon/memory.current": "6000\n"}, 0),
    ],
)
def test_the_tightest_cgroup_counts(tmp_path, files, expected):
    assert spare_memory(tmp_path, *cgroups(tmp_path, files)) == expected


def test_without_a_limit_the_mount_counts(tmp_path):
    stats = os.statvfs(tmp_path)
    found = spare_memory(tmp_path / "not" / "there", *cgroups(tmp_path, {}))
    assert abs(found - stats.f_bavail * stats.f_frsize) < GIB
