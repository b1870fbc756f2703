"""Store in a directory, on disk or in shared memory."""
