"""The instances: their health, their load, and the choice among them. No I/O."""
