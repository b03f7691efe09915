"""`rollouts media`: the media of a store or a trajectory file: listed, verified, exported."""
