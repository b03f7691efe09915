"""The configuration file of `rollouts run`, `eval` and `serve` is checked, and its objects are made."""
