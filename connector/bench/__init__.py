"""Benchmarks that print ratios measured side by side, never absolute claims."""

BENCHMARKS = {"copy": "connector.bench.copy_ratios", "lookup": "connector.bench.lookup"}
"""Modules with ``measure()``, giving what ``--json`` prints, and ``table(measured)``, giving text."""
