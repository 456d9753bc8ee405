"""The vLLM connector: `kv_connector="PagewardenConnector"`, `kv_connector_module_path="connector.vllm"`.

The class is imported on first use, so that everything else here imports where vLLM is not installed.
"""

from __future__ import annotations

from typing import Any

__all__ = ["PagewardenConnector"]


def __getattr__(name: str) -> Any:
    if name == "PagewardenConnector":
        from connector.vllm.connector import PagewardenConnector

        return PagewardenConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
