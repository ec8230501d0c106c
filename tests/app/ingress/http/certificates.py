"""Certificates of authorities, servers and clients, made for a test."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Certificate:
    """A certificate and its key, and the files that hold them."""

    held: x509.Certificate
    key: ec.EllipticCurvePrivateKey
    certfile: str
    keyfile: str

    def spoil(self) -> None:
        """Leave half a file."""
        Path(self.certfile).write_text("-----BEGIN")


def make(folder: Path, name: str, issuer: Certificate | None = None) -> Certificate:
    """A certificate for 127.0.0.1, signed by `issuer` or, as an authority, by itself. Replaces files of that name."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.held.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(issuer is None, None), True)
    )
    certificate = builder.sign(key if issuer is None else issuer.key, hashes.SHA256())
    certfile, keyfile = folder / f"{name}.pem", folder / f"{name}.key"
    certfile.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    encoding = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    keyfile.write_bytes(key.private_bytes(*encoding))
    return Certificate(certificate, key, str(certfile), str(keyfile))
