"""`rollouts report`: the report of a run as an HTML file."""
