"""Where vLLM is asked to keep a state."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm_stand_ins import CHUNK, Request

from appliance.hashing import PromptIdentity
from connector.vllm.requests import TrackedRequest
from connector.vllm.snapshots import aim, plan_snapshots, prompt_boundaries


def tracked(prompt_tokens: int, **attributes: Any) -> TrackedRequest:
    request = Request("r", range(prompt_tokens))
    for name, value in attributes.items():
        setattr(request, name, value)
    following = TrackedRequest(request, PromptIdentity(), b"")  # type: ignore[arg-type]
    following.keys_for(CHUNK, 0)
    return following


@pytest.mark.parametrize(
    ("prompt_tokens", "boundaries"),
    [(0, set()), (8, {8}), (9, {8}), (16, {8, 16}), (17, {16})],
)
def test_the_last_boundaries_of_a_prompt(prompt_tokens: int, boundaries: set[int]) -> None:
    assert prompt_boundaries(prompt_tokens, CHUNK) == boundaries


def test_boundaries_are_aimed_at_in_order_and_vllms_own_is_among_them() -> None:
    following = tracked(70, shared_prefix_boundary=40)
    plan_snapshots(following, CHUNK, [2])
    aimed = []
    for position in (0, 16, 40, 63):
        aim(following, position, generated=False)
        aimed.append(following.request.shared_prefix_boundary)
    assert aimed == [16, 40, 64, 64]


def test_in_generated_text_the_next_boundary_is_aimed_at_if_it_can_be_reached() -> None:
    following = tracked(70, max_tokens=12)
    plan_snapshots(following, CHUNK, [])
    aim(following, 70, generated=True)
    assert following.request.shared_prefix_boundary == 72
    aim(following, 72, generated=True)
    assert following.request.shared_prefix_boundary == 80
    aim(following, 80, generated=True)
    assert following.request.shared_prefix_boundary == 80


def test_a_vllm_without_the_attribute_is_left_alone() -> None:
    following = tracked(70)
    following.request = SimpleNamespace(num_prompt_tokens=70, all_token_ids=[], max_tokens=5)  # type: ignore[assignment]
    plan_snapshots(following, CHUNK, [2])
    aim(following, 0, generated=True)
    assert not hasattr(following.request, "shared_prefix_boundary")
    assert following.wanted == {16, 64}
