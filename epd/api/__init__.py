"""Bodies as they go over the wire: what requests say, what instances are sent, what they answer."""
