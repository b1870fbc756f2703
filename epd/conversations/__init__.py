"""Conversations: KV blocks and instances that one turn leaves for the next one."""
