"""Keys of vLLM's own requests: equal exactly where the bytes may be shared."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import Request

from appliance.hashing import ChunkHasher
from connector.vllm.identity import IdentityReader
from tests.e2e.harness import prompt
from tests.e2e.scheduler.conftest import StartEngine
from tests.e2e.scheduler.geometry import kimi_linear

CHUNK = 64
TOKENS = prompt(1, 4 * CHUNK)
PLACEHOLDER = 999

Feature = tuple[str, int, int]


def request(tokens: list[int] | None = None, **fields: Any) -> Request:
    return Request("r", list(tokens or TOKENS), SamplingParams(max_tokens=4), None, **fields)


def keys(wanted: Request, reader: IdentityReader | None = None) -> list[bytes]:
    identity = (reader or IdentityReader("")).identity(wanted)
    assert identity is not None
    return ChunkHasher(CHUNK, identity).keys(wanted.all_token_ids)


def with_media(*features: Feature, modality: str = "image", **fields: Any) -> Request:
    """A request with media; each is (identifier, offset, length) and fills its place with placeholder tokens."""
    tokens = list(TOKENS)
    specs = []
    for identifier, offset, length in features:
        tokens[offset : offset + length] = [PLACEHOLDER] * length
        specs.append(MultiModalFeatureSpec(None, modality, identifier, PlaceholderRange(offset, length)))
    return request(tokens, mm_features=specs, **fields)


def first_difference(one: Request, other: Request) -> int:
    """The first chunk whose keys differ; every later one must differ too, for keys are chained."""
    ours, theirs = keys(one), keys(other)
    equal = [mine == your for mine, your in zip(ours, theirs, strict=True)]
    assert equal == sorted(equal, reverse=True)
    return equal.count(True)


A = "a" * 64
MEDIA = {
    "same last 16 bits": ("b" * 60 + "aaaa", 70, 20),
    "same first 16 bits": ("aaaa" + "b" * 60, 70, 20),
    "one character": ("a" * 63 + "b", 70, 20),
    "a longer identifier": (A + "a", 70, 20),
    "another offset": (A, 71, 20),
    "another length": (A, 70, 21),
}


def test_the_same_medium_at_the_same_place_is_shared() -> None:
    assert first_difference(with_media((A, 70, 20)), with_media((A, 70, 20))) == 4


@pytest.mark.parametrize("other", MEDIA.values(), ids=MEDIA.keys())
def test_another_medium_differs_from_the_first_chunk_it_touches(other: Feature) -> None:
    assert first_difference(with_media((A, 70, 20)), with_media(other)) == 1


def test_the_same_placeholder_tokens_are_no_identity() -> None:
    one, other = with_media((A, 70, 20)), with_media((A, 70, 20))
    other.mm_features.clear()
    assert one.prompt_token_ids == other.prompt_token_ids
    assert first_difference(one, other) == 1


@pytest.mark.parametrize("second_offset", [95, 140])
def test_media_that_swap_places_differ(second_offset: int) -> None:
    one = with_media((A, 70, 20), ("b" * 64, second_offset, 20))
    other = with_media(("b" * 64, 70, 20), (A, second_offset, 20))
    assert one.prompt_token_ids == other.prompt_token_ids
    assert first_difference(one, other) == 1


def test_another_modality_differs() -> None:
    assert first_difference(with_media((A, 70, 20)), with_media((A, 70, 20), modality="video")) == 1


def test_a_medium_counts_in_every_chunk_that_it_reaches_into() -> None:
    assert first_difference(with_media((A, 60, 10)), with_media(("b" * 64, 60, 10))) == 0
    assert first_difference(with_media((A, 128, 64)), with_media(("b" * 64, 128, 64))) == 2


def test_a_medium_beyond_the_shared_chunks_does_not_matter() -> None:
    assert first_difference(with_media((A, 200, 20)), request(with_media((A, 200, 20)).prompt_token_ids)) == 3


def test_salts_separate_and_equal_salts_share() -> None:
    salted = [request(cache_salt=salt) for salt in (None, "tenant", "tenant", "other")]
    assert first_difference(salted[1], salted[2]) == 4
    assert first_difference(salted[0], salted[1]) == first_difference(salted[1], salted[3]) == 0


def test_an_engines_salt_is_not_mistaken_for_a_requests() -> None:
    first = {
        keys(request(cache_salt=own), IdentityReader(engines))[0]
        for engines, own in [("a", "b"), ("ab", None), ("", "ab")]
    }
    assert len(first) == 3


# --- adapters -------------------------------------------------------------------------------------------------------

MakeAdapter = Callable[..., LoRARequest]


@pytest.fixture
def adapter(tmp_path: Path) -> MakeAdapter:
    """Makes an adapter on disk; the same directory and content unless said otherwise."""

    def make(
        name: str = "poet", directory: str = "one", content: bytes = b"weights", **fields: Any
    ) -> LoRARequest:
        place = tmp_path / directory
        place.mkdir(exist_ok=True)
        weights = place / "adapter_model.safetensors"
        if not weights.exists() or weights.read_bytes() != content:
            (place / "adapter_config.json").write_text("{}")
            weights.write_bytes(content)
        return LoRARequest(name, fields.pop("lora_int_id", 1), str(place), **fields)

    return make


def adapted(lora: LoRARequest) -> Request:
    return request(lora_request=lora)


def test_the_same_adapter_is_shared_and_never_with_the_base_model(adapter: MakeAdapter) -> None:
    assert first_difference(adapted(adapter()), adapted(adapter())) == 4
    assert first_difference(adapted(adapter()), request()) == 0


def test_the_number_that_vllm_gave_an_adapter_is_no_part_of_it(adapter: MakeAdapter) -> None:
    assert first_difference(adapted(adapter(lora_int_id=1)), adapted(adapter(lora_int_id=2))) == 4


@pytest.mark.parametrize(
    "other",
    [
        {"name": "critic"},
        {"directory": "two"},
        {"directory": "two", "content": b"other weights"},
        {"is_3d_lora_weight": True},
    ],
    ids=["name", "path", "path and content", "layout"],
)
def test_another_adapter_differs(adapter: MakeAdapter, other: dict[str, Any]) -> None:
    assert first_difference(adapted(adapter()), adapted(adapter(**other))) == 0


def test_another_content_under_the_same_name_and_path_differs(adapter: MakeAdapter) -> None:
    before = keys(adapted(adapter()))
    assert keys(adapted(adapter(content=b"weightS")))[0] != before[0]


def test_names_and_paths_are_not_run_together(adapter: MakeAdapter, tmp_path: Path) -> None:
    separator = "|"
    one = adapter(directory="x")
    (tmp_path / "y").symlink_to(tmp_path / "x")
    outer = adapter(name=f"poet{separator}{tmp_path / 'y'}", directory="x")
    inner = LoRARequest("poet", 1, f"{tmp_path / 'y'}{separator}{one.lora_path}")
    reader = IdentityReader("")
    assert reader.identity(adapted(inner)) is None  # no such directory: nothing names its content
    assert reader.identity(adapted(outer)) != reader.identity(adapted(one))


def test_an_adapter_that_changed_on_disk_cannot_be_named_until_it_is_loaded_again(
    adapter: MakeAdapter,
) -> None:
    reader = IdentityReader("")
    before = reader.identity(adapted(adapter()))
    assert before is not None
    changed = adapter(content=b"weights of another length")
    # vLLM may still use what it read before, or may have read the new files: nobody knows.
    assert reader.identity(adapted(changed)) is None
    again = reader.identity(adapted(adapter(content=b"weights of another length", load_inplace=True)))
    assert again is not None
    assert again != before
    assert reader.identity(adapted(changed)) == again


def test_media_under_an_adapter_carry_both_identities(adapter: MakeAdapter) -> None:
    lora = adapter()
    one = with_media((A, 70, 20), lora_request=lora)
    assert first_difference(one, with_media((A, 70, 20))) == 0
    assert first_difference(one, with_media(("b" * 64, 70, 20), lora_request=lora)) == 1


# --- what cannot be named -------------------------------------------------------------------------------------------


def test_prompt_embeddings_have_no_name() -> None:
    embedded = Request("r", None, SamplingParams(max_tokens=4), None, prompt_embeds=torch.zeros((200, 8)))
    assert IdentityReader("").identity(embedded) is None
    mixed = request(prompt_embeds=torch.zeros((len(TOKENS), 8)), prompt_is_token_ids=[True] * len(TOKENS))
    assert IdentityReader("").identity(mixed) is None


def test_a_medium_without_identifier_has_no_name() -> None:
    assert IdentityReader("").identity(with_media(("", 70, 20))) is None


def test_the_scheduler_neither_stores_nor_looks_up_what_has_no_name(start_engine: StartEngine) -> None:
    geometry = kimi_linear(8)
    engine = start_engine(geometry)
    engine.settle()
    text = prompt(600, 3 * geometry.chunk_tokens)
    engine.add("r", text, prompt_embeds=torch.zeros((len(text), 8)), prompt_is_token_ids=[True] * len(text))
    engine.run()
    assert engine.saved == {}
    assert engine._side.counters.lookups == 0
    engine.assert_nothing_held()


def test_tenants_and_media_do_not_hit_each_other(start_engine: StartEngine) -> None:
    geometry = kimi_linear(8)
    engine = start_engine(geometry)
    text = prompt(601, 3 * geometry.chunk_tokens + 1)

    def medium(identifier: str) -> list[MultiModalFeatureSpec]:
        return [MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(300, 40))]

    variants: dict[str, dict[str, Any]] = {
        "plain": {},
        "tenant": {"cache_salt": "tenant"},
        "image": {"mm_features": medium(A)},
        "other-image": {"mm_features": medium("b" * 60 + "aaaa")},
    }
    engine.scheduler.max_num_encoder_input_tokens = (
        4096  # the stand-in model has no encoder that would set it
    )
    engine.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=4096)
    for name, fields in variants.items():
        engine.add(name, text, **fields)
        engine.run()
        engine.forget_local_cache()
    # Only the chunk before the images is common to them. The first of them stores a state there.
    assert engine.hits == {"other-image": geometry.chunk_tokens}
    engine.hits.clear()
    for name, fields in variants.items():
        engine.add(f"{name}-again", text, **fields)
        engine.run()
        engine.forget_local_cache()
    assert engine.hits == {f"{name}-again": 3 * geometry.chunk_tokens for name in variants}
    engine.assert_nothing_held()
