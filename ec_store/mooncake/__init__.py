"""Tier in Mooncake Store: memory of many hosts, over RDMA or TCP (docs/guides/which-store.md)."""
