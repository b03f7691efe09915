"""Groups of episodes for the tasks of a run."""
