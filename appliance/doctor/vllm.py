"""The settings of a running vLLM, from its Prometheus metrics: ``vllm:cache_config_info`` carries them as labels."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from appliance.doctor.findings import Code, Finding, Severity
from appliance.doctor.subject import Subject
from appliance.protocol.status import DaemonStatus

TIMEOUT_SECONDS = 5.0
MAX_METRICS_BYTES = 16 << 20
CONFIG_METRIC = "vllm:cache_config_info"
CONNECTOR_PREFIX = "vllm:pagewarden_"


def vllm(subject: Subject) -> Iterator[Finding]:
    """What the engine at ``vllm_url`` says of its cache."""
    if not subject.vllm_url:
        return
    try:
        labels, has_connector = read_engine(subject.vllm_url)
    except (OSError, ValueError) as error:
        yield _finding(
            Code.VLLM_UNREACHABLE,
            Severity.PROBLEM,
            f"No vLLM metrics can be read at {subject.vllm_url}.",
            str(error),
            "Give the address of vLLM's API server, such as http://127.0.0.1:8000.",
        )
        return
    if labels.get("enable_prefix_caching") != "True":
        yield _finding(
            Code.VLLM_NO_PREFIX_CACHING,
            Severity.PROBLEM,
            "Prefix caching is off in this vLLM: it keeps no block boundary that could be stored.",
            f"enable_prefix_caching={labels.get('enable_prefix_caching', 'missing')}",
            "Start it with --enable-prefix-caching.",
        )
    if not has_connector:
        yield _finding(
            Code.VLLM_NO_CONNECTOR,
            Severity.PROBLEM,
            "This vLLM has no Pagewarden connector.",
            f"no metric begins with {CONNECTOR_PREFIX}",
            "Start it with --kv-transfer-config, as pagewarden plan writes it.",
        )
    yield from _beside_daemon(labels, subject.running)


def _beside_daemon(labels: dict[str, str], status: DaemonStatus | None) -> Iterator[Finding]:
    recurrent = {group.namespace for group in (status.groups if status else []) if group.kind == "recurrent"}
    hybrid = any(engine.namespace in recurrent for engine in (status.engines if status else []))
    mode = labels.get("mamba_cache_mode", "none")
    if (hybrid or labels.get("mamba_block_size", "None") != "None") and mode != "align":
        yield _finding(
            Code.VLLM_MAMBA_MODE,
            Severity.PROBLEM,
            "Recurrent states are not kept at block boundaries.",
            f"mamba_cache_mode={mode}",
            "Start vLLM with --mamba-cache-mode align and prefix caching.",
        )
    block = labels.get("block_size", "")
    known = {tokens for engine in (status.engines if status else []) for tokens in engine.block_tokens}
    if known and block.isdigit() and int(block) not in known:
        yield _finding(
            Code.VLLM_BLOCK_SIZE,
            Severity.WARNING,
            "This vLLM's block size is that of no engine here: it has not registered with this daemon.",
            f"block_size={block}; engines here have {sorted(known)}",
            "Check pagewarden.host and pagewarden.port of that vLLM, and its log.",
        )


def read_engine(url: str) -> tuple[dict[str, str], bool]:
    """The labels of its cache configuration, and whether it has the connector's metrics.

    Raises:
        OSError: if it cannot be reached. ValueError: if what it answers are no metrics of vLLM.
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise ValueError(f"'{url}' is no http address")
    with urllib.request.urlopen(f"{url.rstrip('/')}/metrics", timeout=TIMEOUT_SECONDS) as answer:  # noqa: S310
        text = answer.read(MAX_METRICS_BYTES).decode("utf-8", "replace")
    labels: dict[str, str] | None = None
    has_connector = False
    for family in text_string_to_metric_families(text):
        has_connector |= family.name.startswith(CONNECTOR_PREFIX)
        if family.name == CONFIG_METRIC or family.name + "_info" == CONFIG_METRIC:
            labels = dict(family.samples[0].labels) if family.samples else labels
    if labels is None:
        raise ValueError(f"there is no metric {CONFIG_METRIC}")
    return labels, has_connector


def _finding(code: Code, severity: Severity, message: str, evidence: str, remedy: str) -> Finding:
    return Finding(
        area="vllm", code=code, severity=severity, message=message, evidence=evidence, remedy=remedy
    )
