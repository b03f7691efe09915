"""Forward passes of transformers models with images placed by range, for the local engine and the trainer."""
