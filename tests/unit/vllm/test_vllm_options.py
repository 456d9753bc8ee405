"""Options: names, aliases of the peer's, and one sentence about each mistake."""

import pytest

from appliance.errors import InvalidSettings
from connector.vllm.options import ConnectorOptions


def test_defaults_are_the_daemons_own() -> None:
    options = ConnectorOptions.from_extra_config(None)
    assert (options.host, options.port, options.store_generated) == ("127.0.0.1", 6555, True)


def test_own_names_win_over_the_peers_and_foreign_keys_are_left_alone() -> None:
    options = ConnectorOptions.from_extra_config(
        {
            "lmcache.mp.host": "tcp://cache.internal",
            "lmcache.mp.port": 7000,
            "pagewarden.port": 7001,
            "other.product": {"a": 1},
        }
    )
    assert (options.host, options.port) == ("cache.internal", 7001)


@pytest.mark.parametrize(
    ("extra", "option"),
    [
        ({"pagewarden.prot": 1}, "pagewarden.prot"),
        ({"pagewarden.port": 0}, "pagewarden.port"),
        ({"pagewarden.lookup_timeout_seconds": -1}, "pagewarden.lookup_timeout_seconds"),
        ({"lmcache.mp.port": "x"}, "pagewarden.port"),
    ],
)
def test_a_mistake_is_named(extra: dict[str, object], option: str) -> None:
    with pytest.raises(InvalidSettings, match=option) as caught:
        ConnectorOptions.from_extra_config(extra)
    assert caught.value.details["option"] == option
