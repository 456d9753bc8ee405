"""Asking a daemon to check itself, and telling what it found."""

from __future__ import annotations

import time

from appliance.protocol.client import RequestClient
from appliance.protocol.messages import Check, CheckResult

ASK_AGAIN_SECONDS = 0.1


def run_check(client: RequestClient) -> CheckResult:
    """Start a check and wait until it is done.

    Raises:
        PagewardenError: what the daemon answered, or that it did not.
    """
    result = client.call("check", Check(), CheckResult)
    while not result.done:
        time.sleep(ASK_AGAIN_SECONDS)
        result = client.call("check", Check(run=result.run), CheckResult)
    return result


def check_text(result: CheckResult) -> str:
    """The result for people."""
    checked = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in sorted(result.checked.items()))
    lines = [f"{finding.kind}: {finding.sentence}" for finding in result.findings]
    if result.findings_total > len(result.findings):
        lines.append(f"and {result.findings_total - len(result.findings)} more")
    lines += [f"note: {sentence}" for sentence in result.notes]
    if result.failure:
        lines.append(f"The check could not be carried through. {result.failure}")
    verdict = "All adds up" if result.clean else f"{result.findings_total} findings"
    lines.append(
        f"{verdict}: {checked or 'nothing'} checked in {result.seconds:.1f} s, in {result.looks} looks of at most "
        f"{result.longest_look_ms:.1f} ms."
    )
    return "\n".join(lines)
