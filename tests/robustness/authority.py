"""Certificate authority for tests."""

import datetime as dt
import ipaddress
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = dt.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, in PEM."""

    cert: bytes
    key: bytes

    def write(self, folder, name):
        """Write both; return their paths."""
        cert, key = folder / f"{name}.pem", folder / f"{name}.key"
        cert.write_bytes(self.cert)
        key.write_bytes(self.key)
        key.chmod(0o600)
        return str(cert), str(key)

    def locked(self):
        """Return the key encrypted with a password."""
        key = serialization.load_pem_private_key(self.key, None)
        return _pem(key, serialization.BestAvailableEncryption(b"secret"))


def _pem(key, encryption=None):
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, encryption or serialization.NoEncryption())


def _name(common_name):
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


class Authority:
    """Certificate authority with a self-signed certificate."""

    def __init__(self, name="authority"):
        self._name, self._key = name, ec.generate_private_key(ec.SECP256R1())
        self._own = self._sign(name, self._key, 30, x509.BasicConstraints(ca=True, path_length=0))
        self.pem = self._own.public_bytes(serialization.Encoding.PEM)

    def issue(self, *names, days=30):
        """Return a certificate for host names or addresses, and its key; with negative days it has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        cert = self._sign(names[0], key, days, x509.SubjectAlternativeName([_host(name) for name in names]))
        return Pair(cert.public_bytes(serialization.Encoding.PEM), _pem(key))

    def _sign(self, subject, key, days, extension):
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(_name(subject))
            .issuer_name(_name(self._name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 60 * DAY)
            .not_valid_after(now + days * DAY)
            .add_extension(extension, critical=True)
            # Clients of Python 3.13 and later require these (ssl.VERIFY_X509_STRICT).
            .add_extension(_usage(signs=subject == self._name), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )


def _usage(*, signs):
    """Return the uses of an authority's key, or of another one."""
    uses = dict.fromkeys(
        ("content_commitment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only"), False
    )
    return x509.KeyUsage(
        digital_signature=not signs, key_encipherment=not signs, key_cert_sign=signs, crl_sign=signs, **uses
    )


def _host(name):
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
