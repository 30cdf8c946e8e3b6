"""The four books as a web site: `scripts/docs`, which is strict."""

project = "flockstep"
author = "the flockstep authors"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "flockstep"
exclude_patterns = ["_build"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
nitpicky = True
