"""The looking glass behind `rollouts media`: what a store or a trajectory file holds, checked, and as files."""
