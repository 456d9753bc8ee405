"""Copies for the memory that an engine's cache lies in: the CPU's, or a GPU's behind a small interface."""

from connector.client.device.choice import Copies, HostCopies, copies_for

__all__ = ["Copies", "HostCopies", "copies_for"]
