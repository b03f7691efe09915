"""The viewer shows trajectories as a page in a browser: one file, or served while a run writes them."""

from rollouts.view.page import write_html

__all__ = ["write_html"]
