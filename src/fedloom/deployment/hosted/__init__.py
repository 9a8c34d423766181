"""Runs in federations that others operate, with their engine's wire: what is the same under each of these engines."""
