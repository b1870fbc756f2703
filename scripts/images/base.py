"""Images of Debian that replace those of Python and of vLLM."""

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

from scripts.images.programs import CERTIFICATES, RUN, Builder, run

DEBIAN = {(3, 11): "bookworm", (3, 13): "trixie"}
"""Releases of Debian by their Python."""
PACKAGES = ["ca-certificates", "python3", "python3-venv", "python-is-python3"]
COMPILER = ["g++", "libnuma1", "python3-dev"]
"""Packages with which vLLM's CPU build compiles for the machine that it runs on."""
NOT_OF_VLLM = ("epd_proxy*", "ec_store*", "*editable*", "babel", "material", "mypy", "playwright")
"""Packages of this environment that stay out of the image: this project's, and large ones of its
tests and documents."""
VLLM_PROGRAM = """\
#!/usr/bin/python3
from vllm.entrypoints.cli.main import main

if __name__ == "__main__":
    main()
"""
INSTALL_UV = """
python -m venv /opt/uv && /opt/uv/bin/pip install uv && ln -s /opt/uv/bin/uv /usr/local/bin
"""
WORKING = "epd-images-working"
"""Container in which a base is made."""


class Bases:
    """Base images. One that exists is used again."""

    names = ("epd-base", "epd-base-compiler", "epd-base-vllm")

    def python(self) -> str:
        """Return the image for the proxy and the store."""
        return self._image("epd-base", lambda: self._debian((3, 13), PACKAGES))

    def vllm(self, builder: Builder) -> str:
        """Return the image for engines: vLLM in the system's Python, and uv, as vLLM's own has it.

        The packages, 4 GB, are copied from this environment, not downloaded.
        """
        here = sys.version_info[:2]
        compiler = self._image(
            "epd-base-compiler", lambda: self._debian(here, [*PACKAGES, *COMPILER])
        )
        return self._image("epd-base-vllm", lambda: self._with_vllm(compiler, builder))

    def _image(self, name: str, make: Callable[[], None]) -> str:
        image = f"localhost/{name}"
        exists = subprocess.run(
            ["podman", "image", "exists", image],  # noqa: S607
            check=False,
        )
        if exists.returncode:
            run("buildah", "rm", WORKING, check=False)  # of a run that was killed
            make()
            run("buildah", "commit", "--rm", WORKING, image)
            print(f"{name}: made of Debian's packages")
        return image

    def _debian(self, python: tuple[int, int], packages: Sequence[str]) -> None:
        if python not in DEBIAN:
            sys.exit(f"no release of Debian has Python {'.'.join(map(str, python))}")
        tar = str(RUN / "debian.tar")
        include = f"--include={','.join(packages)}"
        run("mmdebstrap", "--variant=minbase", include, DEBIAN[python], tar)
        run("buildah", "from", f"--name={WORKING}", "scratch")
        run("buildah", "add", WORKING, tar, "/")
        Path(tar).unlink()

    def _with_vllm(self, compiler: str, builder: Builder) -> None:
        run("buildah", "from", f"--name={WORKING}", compiler)
        root = Path(run("buildah", "mount", WORKING))
        shutil.copytree(
            sysconfig.get_path("purelib"),
            root / f"usr/local/lib/python3.{sys.version_info.minor}/dist-packages",
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns(*NOT_OF_VLLM),
        )
        for marker in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
            marker.unlink()  # vLLM's image has none
        program = root / "usr/local/bin/vllm"
        program.write_text(VLLM_PROGRAM)
        program.chmod(0o755)
        run("buildah", "umount", WORKING)
        run("buildah", "run", *builder.build_flags(), WORKING, "sh", "-c", INSTALL_UV)
        run("buildah", "config", f"--env=SSL_CERT_FILE={CERTIFICATES}", WORKING)
