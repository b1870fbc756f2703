"""Command `epd bench compare`: plain vLLM and fleets of this project with the same requests."""
