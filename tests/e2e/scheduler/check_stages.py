"""Pipeline stages: each holds the shards of its own layers, and a stage without layers of a group holds none of it."""

from dataclasses import replace

import pytest

from tests.e2e.harness import prompt
from tests.e2e.scheduler.conftest import StartEngine
from tests.e2e.scheduler.geometry import Geometry, kimi, kimi_linear

FOUR_LAYERS = kimi("four-layers", states=3, latents=1, heads=32, tensor=2)
"""Cut in two, the first stage has layers of two recurrent groups, the second those of the others."""


@pytest.mark.parametrize(
    "geometry",
    [
        replace(FOUR_LAYERS, pipeline=2),
        replace(FOUR_LAYERS, name="four-stages", pipeline=4),
        replace(kimi_linear(2), name="kimi-linear-tp2-pp2", pipeline=2),
    ],
    ids=lambda geometry: geometry.name,
)
def test_stages_store_and_load_their_own_layers(start_engine: StartEngine, geometry: Geometry) -> None:
    engine = start_engine(geometry)
    chunk = geometry.chunk_tokens
    text = prompt(700, 3 * chunk)
    engine.add("stored", text)
    engine.run()
    assert engine.states_of("stored") == {2 * chunk, 3 * chunk}
    engine.forget_local_cache()
    engine.add("again", [*text, 1])
    engine.run()
    assert engine.hits == {"again": 3 * chunk}
    engine.assert_nothing_held()


def test_a_stage_has_only_the_shards_of_its_layers(start_engine: StartEngine) -> None:
    engine = start_engine(replace(FOUR_LAYERS, pipeline=2))
    held = [sorted(rank.shards.items()) for rank in engine.ranks]
    # The states are divided over the two tensor ranks, the latents are not.
    assert held == [
        [(0, 0), (1, 0)],
        [(0, 1), (1, 1)],
        [(2, 2), (3, 1)],
        [(2, 3), (3, 1)],
    ]


def test_another_cut_of_the_same_layers_is_another_namespace(start_engine: StartEngine) -> None:
    """The bytes of a shard are other layers' then, though every layer is described the same."""
    layers = kimi_linear(2).layers[:6]
    even = replace(kimi_linear(2), name="even", layers=layers, pipeline=2)

    class Uneven(Geometry):
        def stage_layers(self, stage: int) -> dict[str, object]:  # type: ignore[override]
            return dict(self.layers[:2] if stage == 0 else self.layers[2:])

    uneven = Uneven(**{field: getattr(even, field) for field in even.__dataclass_fields__})
    namespaces = set()
    for geometry in (even, uneven):
        engine = start_engine(geometry)
        engine.settle()
        settled = engine._side._client.settlement
        assert settled is not None
        namespaces.add(settled.namespace)
    assert len(namespaces) == 2
