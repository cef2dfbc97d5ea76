"""The composition root: reads config, builds objects, runs stages, owns the command line."""
