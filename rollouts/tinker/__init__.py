"""The Tinker API over a `Trainer` and the engines of this package: `rollouts tinker`."""
