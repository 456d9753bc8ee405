"""The connector on vLLM's own `Scheduler`, with a real daemon and real ranks but no model.

The `check_*.py` files run inside the vLLM environment, see `run_checks.py`; `tests/e2e/test_scheduler.py` starts them.
"""
