"""The identity of a checkpoint."""

import os
from pathlib import Path

import pytest

from connector.vllm.facts import canonical
from connector.vllm.weights import SAMPLE_BYTES, directory_digest, file_digest


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"layers": 2}')
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 8)
    (tmp_path / "README.md").write_text("words")
    return tmp_path


def test_copies_are_the_same_and_words_about_them_do_not_count(checkpoint: Path) -> None:
    before = directory_digest(checkpoint)
    os.utime(checkpoint / "model.safetensors", (1, 1))
    (checkpoint / "README.md").write_text("other words")
    assert directory_digest(checkpoint) == before


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b'{"layers": 3}'),
        ("model.safetensors", bytes(range(255)) * 8),
        ("more.safetensors", b"x"),
    ],
)
def test_every_part_of_a_checkpoint_counts(checkpoint: Path, name: str, content: bytes) -> None:
    before = directory_digest(checkpoint)
    (checkpoint / name).write_bytes(content)
    assert directory_digest(checkpoint) != before


def test_a_large_file_is_sampled_from_its_first_to_its_last_byte(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    content = bytearray(40 * SAMPLE_BYTES)
    path.write_bytes(content)
    digests = {file_digest(path)}
    for position in (0, len(content) - 1):
        changed = bytearray(content)
        changed[position] = 1
        path.write_bytes(changed)
        digests.add(file_digest(path))
    path.write_bytes(content + b"\0")
    digests.add(file_digest(path))
    assert len(digests) == 4


def test_values_of_a_fingerprint_have_one_form() -> None:
    assert canonical({"b": (1, None), "a": float("inf"), 3: {"y", "x"}}) == {
        "3": ["x", "y"],
        "a": "inf",
        "b": [1, None],
    }
