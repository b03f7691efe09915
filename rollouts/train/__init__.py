"""`rollouts train` learns from the episodes of a configuration file, step by step, and continues after a kill."""
