"""Simulated engines: the real clients, copies and bytes, with a model's geometry and no model."""
