"""`rollouts traj`: the episodes of a trajectory file: listed, shown, exported, verified, merged, repaired."""
