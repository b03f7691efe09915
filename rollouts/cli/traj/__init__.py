"""`rollouts traj`: list, show, export, merge and repair the episodes of trajectory files."""
