"""Engine features under which cached bytes would be wrong are refused, with what to change."""

from types import SimpleNamespace
from typing import Any

import pytest

from appliance.errors import UnsupportedGeometry
from connector.vllm.support import check_supported


def config(*, speculative: Any = None, context_ranks: int = 1, caching: bool = True) -> Any:
    return SimpleNamespace(
        speculative_config=speculative,
        parallel_config=SimpleNamespace(prefill_context_parallel_size=context_ranks),
        cache_config=SimpleNamespace(enable_prefix_caching=caching),
    )


def test_a_plain_engine_is_served() -> None:
    check_supported(config())


@pytest.mark.parametrize(
    ("refused", "flag"),
    [
        (config(speculative=object()), "--speculative-config"),
        (config(context_ranks=2), "--prefill-context-parallel-size"),
        (config(caching=False), "--enable-prefix-caching"),
    ],
)
def test_what_is_refused_names_the_flag(refused: Any, flag: str) -> None:
    with pytest.raises(UnsupportedGeometry, match=flag):
        check_supported(refused)
