"""Sources of instances in addition to the configuration: registration, a file, names in the DNS."""
