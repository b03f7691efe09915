"""Environments that ship with the package."""
