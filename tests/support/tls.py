"""TLS certificates of an authority of one's own, for servers on loopback."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


class Authority:
    """Signs certificates; who trusts it has SSL_CERT_FILE at `root`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.root = folder / "root.pem"
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
        certificate = self._sign(self._name, self._key.public_key(), x509.BasicConstraints(ca=True, path_length=0))
        self.root.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, *hosts: str) -> tuple[Path, Path]:
        """Write a certificate for these names and IP addresses; returns its chain and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])])
        certificate = self._sign(subject, key.public_key(), x509.SubjectAlternativeName(list(map(_host, hosts))))
        chain, secret = self._folder / "fullchain.pem", self._folder / "privkey.pem"
        chain.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        formats = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        secret.write_bytes(key.private_bytes(serialization.Encoding.PEM, *formats))
        return chain, secret

    def _sign(self, subject: x509.Name, key: ec.EllipticCurvePublicKey, extension: x509.ExtensionType) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        unsigned = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + DAY)
            .add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        )
        return unsigned.sign(self._key, hashes.SHA256())


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
