"""The parts of `scripts/device_check.py`."""
