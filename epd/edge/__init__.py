"""Downstream side: client connections, request bodies, access, and admission control."""
