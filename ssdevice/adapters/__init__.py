"""An app's adapter: its settings and weights, their places in a bundle, and how they are stored."""
