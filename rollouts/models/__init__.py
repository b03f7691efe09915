"""Running transformers models with images placed by range: what the local engine and the trainer share."""
