"""Environments of other libraries, played against an `Engine`."""
