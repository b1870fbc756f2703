"""What can be set, by what it is about: fields with their limits, and what excludes what."""
