"""The side that clients see: connections, bodies, who may come in, and how many."""
