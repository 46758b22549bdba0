"""Adapters for engines. Nothing of an engine is imported: its objects are taken by their attributes."""
