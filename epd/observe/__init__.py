"""What happened, logged and counted."""
