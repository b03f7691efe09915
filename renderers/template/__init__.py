"""Running a model's own chat template while tracing the origin of every printed character."""
