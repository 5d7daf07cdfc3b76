"""The parity gate: an export is published if it computes what the model computes."""
