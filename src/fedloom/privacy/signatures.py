"""Signatures with keys that are there already: ECDSA by P-384 with SHA-384, or Ed25519, as the key's type says.

Of the two signatures that ECDSA allows for the same words, one is accepted: nobody can turn a signature into another
one that holds as well.
"""

from __future__ import annotations

from hashlib import sha256

from fedloom.errors import ConfigError, MissingExtraError

try:
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519
    from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
except ModuleNotFoundError as error:
    raise MissingExtraError(f"signatures need the package '{error.name}'; pip install 'fedloom[privacy]'") from error

ECDSA = ec.ECDSA(hashes.SHA384())
# How many points the curve P-384 has (FIPS 186-4, D.1.2.4), and the bytes of such a number.
ORDER = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFC7634D81F4372DDF581A0DB248B0A77AECEC196ACCC52973
BYTES = 48

PrivateKey = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


def fingerprint(data: bytes) -> str:
    """What two people compare by telephone: half of a SHA-256, in groups of four."""
    digits = sha256(data).hexdigest()[:32]
    return " ".join(digits[i : i + 4] for i in range(0, len(digits), 4))


def read_private_key(data: bytes) -> PrivateKey:
    """A key in OpenSSH's form, of one of the two types."""
    key = serialization.load_ssh_private_key(data, None)
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key
    if isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, ec.SECP384R1):
        return key
    raise ConfigError(f"a key of type {type(key).__name__} signs nothing here; ECDSA by P-384 and Ed25519 are allowed")


def public_line(key: PrivateKey) -> bytes:
    """The public half in OpenSSH's form, without a comment."""
    form = serialization.PublicFormat.OpenSSH
    return key.public_key().public_bytes(serialization.Encoding.OpenSSH, form)


def sign(data: bytes, key: PrivateKey) -> bytes:
    """The one signature that :func:`is_signed` accepts; of fixed length."""
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key.sign(data)
    r, s = decode_dss_signature(key.sign(data, ECDSA))
    return b"".join(number.to_bytes(BYTES, "big") for number in (r, min(s, ORDER - s)))


def is_signed(data: bytes, signature: bytes, line: bytes) -> bool:
    """Whether the holder of a public key signed exactly this; a line that is no key of the two types signed nothing."""
    try:
        key = serialization.load_ssh_public_key(line)
        if isinstance(key, ed25519.Ed25519PublicKey):
            key.verify(signature, data)
            return True
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
            return False
        r, s = (int.from_bytes(part, "big") for part in (signature[:BYTES], signature[BYTES:]))
        if len(signature) != 2 * BYTES or s > ORDER // 2:
            return False
        key.verify(encode_dss_signature(r, s), data, ECDSA)
        return True
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        return False
