"""Measurements. Nothing in the engine imports this package."""
