"""The checks of a request before it is sent."""
