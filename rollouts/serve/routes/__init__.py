"""The routes of `rollouts serve`, a file for each kind."""
