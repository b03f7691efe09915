"""Trajectories as a page in a browser: one self-contained file, or served while a run writes them."""

from rollouts.view.html_file import write_html

__all__ = ["write_html"]
