"""Choosing at which boundaries vLLM keeps a recurrent state for us.

vLLM splits a prefill chunk at `request.shared_prefix_boundary` and retains the state there. It holds one boundary at a
time, so the nearest one still ahead is set, and the next when a step has passed it. A boundary that vLLM found by
itself is one of them and never lost. Where the attribute is missing, what vLLM offers by itself is taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from connector.vllm.requests import TrackedRequest

ATTRIBUTE = "shared_prefix_boundary"


def prompt_boundaries(prompt_tokens: int, chunk_tokens: int) -> set[int]:
    """The last boundaries of a prompt: the deepest at which the same prompt can be resumed, and a longer one."""
    repeated = max(0, prompt_tokens - 1) // chunk_tokens * chunk_tokens
    continued = prompt_tokens // chunk_tokens * chunk_tokens
    return {repeated, continued} - {0}


def plan_snapshots(tracked: TrackedRequest, chunk_tokens: int, wished_chunks: list[int]) -> None:
    """Collect the boundaries worth a snapshot: what the daemon wishes, the prompt's last, and vLLM's own."""
    request = tracked.request
    natural = int(getattr(request, ATTRIBUTE, 0) or 0)
    tracked.wanted = {chunks * chunk_tokens for chunks in wished_chunks}
    tracked.wanted |= prompt_boundaries(request.num_prompt_tokens, chunk_tokens)
    if natural:
        tracked.wanted.add(natural)


def aim(tracked: TrackedRequest, position_tokens: int, *, generated: bool) -> None:
    """Point vLLM at the nearest wanted boundary beyond `position_tokens`, in generated text too if `generated`."""
    request: Request = tracked.request
    if not hasattr(request, ATTRIBUTE) or not tracked.chunk_tokens:
        return
    ahead = [boundary for boundary in tracked.wanted if boundary > position_tokens]
    if not ahead and generated:
        following = (position_tokens // tracked.chunk_tokens + 1) * tracked.chunk_tokens
        ahead = [following] if following <= request.num_prompt_tokens + request.max_tokens else []
    if ahead:
        setattr(request, ATTRIBUTE, min(ahead))
