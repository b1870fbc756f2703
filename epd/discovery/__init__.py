"""Instances of a running proxy: their sources beside the configuration, and polls of each."""
