"""The configuration file of `rollouts run`, `train`, `eval` and `serve` is checked, and its objects are made."""
