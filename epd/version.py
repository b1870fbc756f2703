"""The version of the package; the build reads it too."""

__version__ = "0.1.0"
