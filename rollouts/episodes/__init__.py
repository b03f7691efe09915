"""An episode is played in an environment against an inference engine, turn by turn, within limits."""
