"""Certificates that `openssl` makes."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")


@dataclass(frozen=True)
class Certificate:
    """Paths of a certificate and of its key."""

    chain: Path
    key: Path

    @property
    def flags(self) -> list[str]:
        return ["--ssl-certfile", str(self.chain), "--ssl-keyfile", str(self.key)]


@dataclass(frozen=True)
class Authority:
    """Private certificate authority; the file `ca` has its own certificate."""

    own: Certificate

    @property
    def ca(self) -> Path:
        return self.own.chain

    @classmethod
    def made(cls, folder: Path, name: str = "ca") -> "Authority":
        own = Certificate(folder / f"{name}.crt", folder / f"{name}.key")
        _openssl(
            *("req", "-x509", *EC, "-nodes", "-days", "2", "-subj", f"/CN={name}"),
            *("-addext", "keyUsage=critical,keyCertSign", "-keyout", own.key, "-out", own.chain),
        )
        return cls(own)

    def issue(self, host: str = "localhost", name: str = "") -> Certificate:
        folder, name = self.ca.parent, name or host
        issued = Certificate(folder / f"{name}.crt", folder / f"{name}.key")
        request, extensions = folder / f"{name}.csr", folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName=DNS:{host}\nauthorityKeyIdentifier=keyid\n")
        _openssl(
            *("req", *EC, "-nodes", "-subj", f"/CN={host}", "-keyout", issued.key, "-out", request)
        )
        _openssl(
            *("x509", "-req", "-days", "2", "-in", request, "-out", issued.chain),
            *("-CA", self.ca, "-CAkey", self.own.key, "-CAcreateserial"),
            *("-extfile", extensions),
        )
        return issued


def encrypted(key: Path) -> Path:
    """Return the same key, encrypted with a passphrase."""
    path = key.with_suffix(".encrypted")
    _openssl("pkey", "-in", key, "-aes256", "-passout", "pass:secret", "-out", path)
    return path


def _openssl(*arguments: str | Path) -> None:
    command = ["openssl", *arguments]
    subprocess.run(command, check=True, capture_output=True)


def localhost_certificate(folder: Path) -> Path:
    """Return one file with a self-signed certificate for `localhost` and its key."""
    path = folder / "localhost.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost", "-keyout", path, "-out", path),
        ],
        check=True,
        capture_output=True,
    )
    return path
