"""Models by name: what they need, and what they leave on disk."""
