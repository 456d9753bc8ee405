"""The trace under tests/data: made up here, from a seed, in the form of the public ones."""

from __future__ import annotations

import json
import random
from pathlib import Path

SMALL_TRACE = Path(__file__).parents[1] / "data" / "small_trace.jsonl"

REQUESTS = 240
SYSTEM_CHUNKS = (2, 5, 9)


def small_trace() -> str:
    """Conversations over three shared system prompts that grow by a few chunks a turn; a third of the requests never return."""
    choose = random.Random(20)
    made = 0
    lines = []
    systems: list[list[int]] = []
    for chunks in SYSTEM_CHUNKS:
        systems.append(list(range(made, made + chunks)))
        made += chunks
    open_conversations: list[list[int]] = []
    now = 0
    for _ in range(REQUESTS):
        now += choose.randrange(4000)
        if open_conversations and choose.random() < 0.6:
            known = choose.choice(open_conversations[-6:])
        else:
            known = list(choose.choice(systems))
            if choose.random() < 0.5:
                open_conversations.append(known)
        fresh = choose.randrange(1, 7)
        prompt = known + list(range(made, made + fresh))
        made += fresh
        for number, conversation in enumerate(open_conversations):
            if conversation is known:
                open_conversations[number] = prompt
        tokens = 512 * len(prompt) + choose.randrange(512)
        ids = prompt + [made] * bool(tokens % 512)
        made += 1
        row = {
            "timestamp": now,
            "input_length": tokens,
            "output_length": choose.randrange(1, 500),
            "hash_ids": ids,
        }
        lines.append(json.dumps(row))
    return "\n".join(lines) + "\n"
