"""Conversations: what a turn leaves for the next, so that its prefix is not computed again."""
