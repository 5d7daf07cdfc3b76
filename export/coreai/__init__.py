"""The Core AI exporter."""
