"""Rollout engines: `hf` is the exact reference in this process, `scripted` the fake for tests."""
