"""Processes that serve one address: their first process, their starts, ends and orders."""
