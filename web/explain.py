"""What the daemon's words mean, in plain English, and what an admin can do about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from appliance.protocol.base import MissReason


@dataclass(frozen=True, slots=True)
class Explanation:
    """A word of the daemon: its title, what happened, and what to do, where there is something."""

    title: str
    meaning: str
    action: str = ""


MISS_REASONS: Mapping[str, Explanation] = {
    MissReason.NEVER_STORED: Explanation(
        "Never stored",
        "No engine has computed this part of a prompt and stored it yet.",
        "Expected for new prompts. If it stays high for repeated ones, check that engines store (bytes in).",
    ),
    MissReason.EVICTED: Explanation(
        "Evicted",
        "It was stored, and left the cache to make room before it was asked for again.",
        "A larger --l1-size-gb keeps it longer.",
    ),
    MissReason.RECURRENT_MISSING: Explanation(
        "Recurrent state missing",
        "Attention pages are there, but no snapshot of the recurrent state at that boundary.",
        "The engine was asked to store one now; the next prompt with this prefix finds it.",
    ),
    MissReason.RANK_MISSING: Explanation(
        "Rank missing",
        "Some ranks stored their shard and others did not, so no rank can load it.",
        "Look for an engine with fewer ranks attached than its world size.",
    ),
    MissReason.WRITE_EXPIRED: Explanation(
        "Write expired",
        "An engine reserved memory for it and did not finish writing in time.",
        "Look for engines that died or stall; raise --l1-write-ttl-seconds if they are only slow.",
    ),
    MissReason.REFUSED_FINGERPRINT: Explanation(
        "Refused by fingerprint",
        "Another engine has it, but its bytes differ in layout or content from what this engine reads.",
        "See Refusals for the fields that differ; make them equal to share.",
    ),
    MissReason.QUARANTINED: Explanation(
        "Quarantined",
        "Its bytes failed their checksum; they are never used again.",
        "One is chance, many are failing memory or a writer that changes pages under its own copy.",
    ),
    MissReason.TOO_SHORT: Explanation(
        "Too short",
        "The prompt is shorter than one chunk, so there is no boundary to stop at.",
        "Normal. A smaller --chunk-size lets shorter prompts hit, at the price of more objects.",
    ),
    MissReason.REGISTERING: Explanation(
        "Registering",
        "The engine asked before all its ranks had attached.",
        "Normal for a moment after an engine starts; if it stays, a rank did not attach.",
    ),
}

LEASE_END_CAUSES: Mapping[str, str] = {
    "released": "The engine loaded what it wanted, or did not need it any more, and let go.",
    "expired": "Nobody renewed it within the read lease TTL.",
    "orphaned": "Its owner never named it in a heartbeat: the reply that granted it was lost.",
    "session_ended": "Its owner's session ended: the engine stopped, died or was silent for too long.",
    "undelivered": "The reply that granted it could not be sent, so it was taken back.",
}

ORDERLY_LEASE_ENDS = frozenset({"released"})
"""Ends that say nothing bad about an engine."""

EVICTION_CAUSES: Mapping[str, str] = {
    "evicted": "The policy chose it to make room.",
    "write_expired": "Its set of shards stayed incomplete past the write TTL.",
    "stranded": "Another shard of the same chunk was lost, so nobody could load it.",
    "quarantined": "Its bytes failed their checksum.",
    "cleared": "An admin cleared it.",
}

ENGINE_STATES: Mapping[str, str] = {
    "ready": "All its ranks have attached; its lookups are answered.",
    "registering": "Waits until all its ranks have attached; its lookups miss until then.",
    "suspect": "Heartbeats are missing. Its holds are kept until its session ends.",
    "refused": "Its registration was refused; its lookups miss.",
}

L1_STATES: Mapping[str, str] = {
    "occupied": "Stored objects that may be evicted",
    "leased": "Stored objects that an engine is about to read",
    "pinned": "Stored objects that an admin keeps",
    "reserved": "Lent to engines that are writing",
    "draining": "Removed, waiting for its last reader",
    "limbo": "Waits for proof that its writer has stopped",
    "free": "Ready to be lent",
    "unpopulated": "Not yet backed by memory",
}


def title_of(word: str) -> str:
    """A word of the daemon as a title: ``write_expired`` becomes ``Write expired``."""
    known = MISS_REASONS.get(word)
    return known.title if known else word.replace("_", " ").capitalize()


def miss_reason(word: str) -> Explanation:
    """The explanation of a miss reason; one of a newer daemon gets its own word as a title."""
    return MISS_REASONS.get(word, Explanation(title_of(word), "This daemon is newer than this page."))
