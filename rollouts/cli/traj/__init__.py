"""`rollouts traj` lists, shows, exports, merges and repairs the episodes of trajectory files."""
