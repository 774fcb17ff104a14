"""`shoal eval`: what a model can do, asked through the running system, and what replay and drafts do to it."""
