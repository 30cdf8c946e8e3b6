"""Hypothesis: a hundred examples each by default; `--hypothesis-profile=long` for the thousands of a long run."""

from hypothesis import settings

# No deadline for one example: it would be a timing assertion, and these machines are noisy.
settings.register_profile("default", deadline=None)
settings.register_profile("long", deadline=None, max_examples=5000)
settings.load_profile("default")
