"""Benchmarks that print ratios measured side by side in one process, never absolute claims."""
