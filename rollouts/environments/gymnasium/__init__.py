"""The model sees the frames of an environment of Gymnasium, and an action is read from what it writes."""
