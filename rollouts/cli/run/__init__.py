"""`rollouts run` runs the tasks of a configuration file."""
