"""Programs that build and start images, and the options with which they run on this machine."""

import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.paths import ROOT

RUN = ROOT / ".run" / "images"
"""Folder of files that last for one run."""
USER = 10001
CONFINED = ["--read-only", "--cap-drop=all", f"--user={USER}:{USER}", "--memory=512m"]
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
PROCESSES = 4096
"""Processes and threads of a container if podman may not raise the limit."""


def run(*command: str, check: bool = True, **options: Any) -> str:
    """Run a program and return its output; exit with what it printed if it fails."""
    done: subprocess.CompletedProcess[str] = subprocess.run(
        command, capture_output=True, text=True, check=False, **options
    )
    if check and done.returncode:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


@dataclass(frozen=True, slots=True)
class Builder:
    """Runtime of containers, and limits that each container needs, on this machine."""

    runtime: str
    limits: Mapping[str, int]

    def podman(self, *words: str) -> list[str]:
        return ["podman", f"--runtime={self.runtime}", *words]

    def run_flags(self) -> list[str]:
        return ["--rm", *(f"--ulimit={name}={most}:{most}" for name, most in self.limits.items())]

    def build_flags(self) -> list[str]:
        """Return flags with which pip in a build reaches its index as pip here does."""
        certificates = f"--volume={CERTIFICATES}:{CERTIFICATES}:ro"
        return [f"--runtime={shutil.which(self.runtime)}", "--network=host", certificates]


def choose_builder(image: str) -> Builder:
    """Return the first runtime and limits with which a confined container runs; or exit.

    Podman raises the limits of files and processes unless they are named, which needs
    CAP_SYS_RESOURCE.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limits: Sequence[Mapping[str, int]] = ({}, {"nofile": files, "nproc": PROCESSES})
    for builder in (Builder(name, each) for each in limits for name in ("crun", "runc")):
        if shutil.which(builder.runtime) is None:
            continue
        command = builder.podman("run", *builder.run_flags(), *CONFINED, image, "true")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return builder
        print(f"refused: {' '.join(command)}\n  {done.stderr.strip()}")
    sys.exit("no runtime starts a container here")
