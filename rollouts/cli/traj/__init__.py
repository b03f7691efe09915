"""`rollouts traj`: list, show, export, verify, merge and repair the episodes of trajectory files."""
