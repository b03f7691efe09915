"""Servers in front of an `Engine`. Needs the extra `serve`."""
