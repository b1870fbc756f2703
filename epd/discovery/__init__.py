"""Where instances come from beside the configuration: registration, a file, names in the DNS."""
