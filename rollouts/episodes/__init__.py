"""Environments, and the episodes that are played in them against an inference engine."""
