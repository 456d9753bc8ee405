"""A report for people."""

from __future__ import annotations

from appliance.doctor.findings import Report, Severity

_MARKS = {Severity.OK: "ok", Severity.NOTE: "note", Severity.WARNING: "WARNING", Severity.PROBLEM: "PROBLEM"}


def report_text(report: Report) -> str:
    """The findings, the worst first, each with its evidence and remedy, and a last line that sums up."""
    beside = "beside the daemon that answers" if report.running else "before a start: no daemon answers"
    what = "from an engine's side of" if report.engine_side else f"{beside} at"
    lines = [f"On {report.host}, {what} {report.endpoint}", ""]
    for finding in report.findings:
        lines.append(f"{_MARKS[finding.severity]:<8} {finding.area}: {finding.message}")
        if finding.evidence:
            lines.append(f"         seen: {finding.evidence}")
        if finding.remedy:
            lines.append(f"         do:   {finding.remedy} [{finding.code.value}]")
    counts = {severity: sum(each.severity is severity for each in report.findings) for severity in Severity}
    parts = [f"{counts[severity]} {severity.value}" for severity in reversed(Severity) if counts[severity]]
    return "\n".join([*lines, "", ", ".join(parts)])
