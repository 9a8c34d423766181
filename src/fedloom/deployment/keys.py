"""Certificates and keys: made where they are used; a private key is never written anywhere else."""

from __future__ import annotations

import datetime
import ipaddress
import os
from pathlib import Path

from fedloom.errors import ConfigError, MissingExtraError
from fedloom.runs.files import explained, write_atomically

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ModuleNotFoundError as error:
    raise MissingExtraError(f"a federation needs the package '{error.name}'; pip install 'fedloom[direct]'") from error

CURVE = ec.SECP384R1()
CA_DAYS, SERVER_DAYS, SILO_DAYS, INVITATION_DAYS = 3650, 825, 365, 30
INVITED = "invited:"  # no silo's name has a colon
COMMENT = "fedloom:"


def write_secret(path: Path, data: bytes) -> None:
    """Readable by its owner alone from the first moment on; what is there already is not replaced."""
    with explained(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)


def make_authority(folder: Path, name: str) -> None:
    """A certificate authority of the federation's own: ca.key and ca.crt."""
    key = ec.generate_private_key(CURVE)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"fedloom federation {name}")])
    certificate = (
        _certificate(subject, subject, key.public_key(), CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    write_secret(folder / "ca.key", _pem(key))
    write_atomically(folder / "ca.crt", certificate.public_bytes(serialization.Encoding.PEM))


def make_server_certificate(folder: Path, host: str, days: int = SERVER_DAYS) -> datetime.datetime:
    """server.key and server.crt, for the host and for this machine itself, signed by the authority in the folder.

    Returns when the certificate expires.
    """
    key = ec.generate_private_key(CURVE)
    hosts = x509.SubjectAlternativeName([_host(name) for name in dict.fromkeys((host, "localhost", "127.0.0.1"))])
    certificate = _signed(folder, host, key.public_key(), days, ExtendedKeyUsageOID.SERVER_AUTH, hosts)
    fresh = folder / "server.key.new"
    fresh.unlink(missing_ok=True)
    write_secret(fresh, _pem(key))
    fresh.replace(folder / "server.key")
    write_atomically(folder / "server.crt", certificate.public_bytes(serialization.Encoding.PEM))
    return certificate.not_valid_after_utc


def make_silo_certificate(folder: Path, silo: str, line: bytes, days: float = SILO_DAYS) -> bytes:
    """A certificate that lets the holder of a key call as a silo, signed by the authority in the folder."""
    key = serialization.load_ssh_public_key(line)
    assert isinstance(key, ec.EllipticCurvePublicKey)  # whoever read the line has seen to it
    certificate = _signed(folder, silo, key, days, ExtendedKeyUsageOID.CLIENT_AUTH)
    return certificate.public_bytes(serialization.Encoding.PEM)


def make_code(folder: Path, silo: str, days: int = INVITATION_DAYS) -> str:
    """A one-time code: a key and a certificate that let its holder do no more than ask for admission as a silo."""
    key = ec.generate_private_key(CURVE)
    certificate = _signed(folder, INVITED + silo, key.public_key(), days, ExtendedKeyUsageOID.CLIENT_AUTH)
    return (_pem(key) + certificate.public_bytes(serialization.Encoding.PEM)).decode()


def code_key(code: str) -> bytes:
    """The public key of a one-time code."""
    return key_line(x509.load_pem_x509_certificate(code.encode()))


def client_key(data: bytes) -> bytes:
    """A silo's key in the form in which TLS takes it."""
    key = serialization.load_ssh_private_key(data, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return _pem(key)


def key_line(certificate: x509.Certificate) -> bytes:
    """The public key of a certificate, as a silo's folder and the register have it."""
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError("a silo's certificate must be of an elliptic curve")
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)


def _signed(
    folder: Path,
    name: str,
    key: ec.EllipticCurvePublicKey,
    days: float,
    use: x509.ObjectIdentifier,
    hosts: x509.SubjectAlternativeName | None = None,
) -> x509.Certificate:
    authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    signer = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = _certificate(subject, authority.subject, key, days)
    if hosts is not None:
        builder = builder.add_extension(hosts, critical=False)
    return (
        builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([use]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA384())
    )


def make_node_key(folder: Path, silo: str) -> Path:
    """A silo's key pair, node.key and node.pub; returns the public one, which says whose it is."""
    key = ec.generate_private_key(CURVE)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    write_secret(folder / "node.key", private)
    write_atomically(folder / "node.pub", public + f" {COMMENT}{silo}\n".encode())
    return folder / "node.pub"


def read_public_key(path: Path) -> tuple[str, bytes]:
    """The silo that a public key says it belongs to, and the key without that comment."""
    try:
        kind, key, comment = path.read_text(encoding="utf-8").split()
        line = f"{kind} {key}".encode()
        found = serialization.load_ssh_public_key(line)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no public key that 'fedloom federation enroll' made: {error}") from error
    if not isinstance(found, ec.EllipticCurvePublicKey) or not comment.startswith(COMMENT):
        raise ConfigError(f"{path} is no public key that 'fedloom federation enroll' made")
    return comment.removeprefix(COMMENT), line


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    start = now - datetime.timedelta(minutes=5)  # clocks differ
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(min(start, now + _days(days - 1)))
    return builder.not_valid_after(now + _days(days))


def _days(count: float) -> datetime.timedelta:
    return datetime.timedelta(days=count)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
