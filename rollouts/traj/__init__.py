"""The looking glass behind `rollouts traj`: the episodes of a trajectory file, checked, shown, and as other formats."""
