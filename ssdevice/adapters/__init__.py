"""An app's adapter: its settings, its weights, where they go in a bundle, and how they are stored."""
