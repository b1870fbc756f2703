"""What happened, logged, counted and traced."""
