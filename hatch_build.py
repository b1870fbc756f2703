"""Dependencies of `epd-proxy`: those of pyproject.toml, and `ec-store` of the same version."""

from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Dependencies(MetadataHookInterface):
    """Hook that the build calls with the metadata of `[project]`, in which it changes values."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the dependencies, with the version that the build has read."""
        version = metadata["version"]
        metadata["dependencies"] = [
            each.format(version=version) for each in self.config["dependencies"]
        ]
