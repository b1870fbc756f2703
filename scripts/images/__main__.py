"""Build the images of `deploy/` on Debian's packages, start `compose.yaml`, and send it a picture.

    python -m scripts.images              # then removes all that it made
    python -m scripts.images --no-engine  # the proxy and the store alone

It needs root, and of Debian `mmdebstrap buildah podman runc netavark aardvark-dns`. No image is
pulled: `python:3.13-slim` is replaced by Debian with its Python, and `vllm/vllm-openai` by Debian
with the packages of vLLM's CPU build that are in this environment. Prometheus, Grafana and Redis
are not started: their images are other projects'. Engines are two more services, with a tiny model.

What the kernel or podman refuses is printed with its message, and left out of the options.
"""

import argparse
import sys
from contextlib import ExitStack

from scripts.images.base import Bases
from scripts.images.checks import check_packages, check_services
from scripts.images.programs import RUN, Builder, choose_builder, run
from scripts.images.services import compose
from tests.paths import ROOT

IMAGES = {
    "ec-store": ("Dockerfile", "--target=store"),
    "epd-proxy": ("Dockerfile",),
    "epd-engine": ("engine.Dockerfile",),
}
"""File and flags of each image, by the name that compose.yaml and the manifests have for it."""


def main() -> None:
    """Build, start, ask, drain and remove."""
    parser = argparse.ArgumentParser(prog="python -m scripts.images", description=summary())
    parser.add_argument("--no-engine", action="store_true", help="only the proxy and the store")
    parser.add_argument("--keep", action="store_true", help="keep the images (default: remove)")
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    RUN.mkdir(parents=True, exist_ok=True)
    names = [name for name in IMAGES if name != "epd-engine" or not args.no_engine]
    with ExitStack() as stack:
        bases = Bases()
        if not args.keep:
            stack.callback(remove, [*names, *bases.names])
        python = bases.python()
        builder = choose_builder(python)
        for name in names:
            base = bases.vllm(builder) if name == "epd-engine" else python
            build(builder, name, base)
        check_packages(builder, names)
        stack.enter_context(compose(builder, engines=not args.no_engine))
        check_services(builder, engines=not args.no_engine)
    print("built, started, answered, drained and stopped")


def summary() -> str:
    return (__doc__ or "").split("\n", maxsplit=1)[0]


def build(builder: Builder, name: str, base: str) -> None:
    """Build an image of `deploy/` on this base."""
    file, *flags = IMAGES[name]
    # Health checks are in Docker's format only.
    command = ["buildah", "build", "--format=docker", *builder.build_flags(), *flags]
    path = ROOT / "deploy" / file
    command += [f"--build-arg=BASE={base}", f"--file={path}", f"--ignorefile={path}.dockerignore"]
    run(*command, f"--tag=localhost/{name}", str(ROOT))
    size = int(run("podman", "image", "inspect", "--format={{.Size}}", f"localhost/{name}"))
    print(f"{name}: built, {size / 1e6:.0f} MB")


def remove(names: list[str]) -> None:
    run("podman", "rmi", "--force", *(f"localhost/{name}" for name in names), check=False)


if __name__ == "__main__":
    main()
