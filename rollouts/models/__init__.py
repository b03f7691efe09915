"""Running transformers models with pictures placed by range: what the local engine and the trainer share."""
