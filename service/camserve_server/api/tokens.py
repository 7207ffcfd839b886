"""Tokens: who may call, kept as hashes in a file of lines `NAME ROLE[,ROLE] SHA256 [expires=DATE]`."""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import TypeAlias

from camserve_server.core.errors import ConfigError, Unauthenticated

ROLES = ("explain", "observe", "admin")
"""What a token may be for: to explain and judge; to see models, methods and reflection; to change something."""

NAME = r"[\w.@-]{1,64}"
LINE = re.compile(rf"({NAME})\s+([a-z,]+)\s+([0-9a-f]{{64}})(?:\s+expires=(\d{{4}}-\d\d-\d\d))?", re.ASCII)
BEARER = re.compile(r"bearer +([!-~]{1,512})", re.ASCII | re.IGNORECASE)
HINT = "send the metadata `authorization: Bearer TOKEN`, once"


@dataclass(frozen=True, slots=True)
class Token:
    """What is known of a token: never the token itself.

    Attributes:
        name: of who holds it, for the log.
        roles: what it is for.
        digest: SHA-256, 32 bytes.
        last_day: on which it is good, in UTC; None for ever.
    """

    name: str
    roles: frozenset[str]
    digest: bytes
    last_day: date | None = None

    def line(self) -> str:
        """Return the line of the file."""
        expires = f" expires={self.last_day}" if self.last_day else ""
        return f"{self.name} {','.join(sorted(self.roles))} {self.digest.hex()}{expires}"


Tokens: TypeAlias = tuple[Token, ...]


def new(name: str, roles: Iterable[str], last_day: date | None = None) -> tuple[str, Token]:
    """Make a token of 256 random bits.

    Returns:
        The token, for who shall hold it, and what to keep of it.

    Raises:
        ConfigError: the name or a role is none.
    """
    if not re.fullmatch(NAME, name, re.ASCII):
        raise ConfigError(f"{name!r} is no name: it takes 1 to 64 letters, digits and any of . _ @ -")
    secret = f"camserve_{secrets.token_urlsafe(32)}"  # the beginning is for those who scan for leaked secrets
    return secret, Token(name, _roles(",".join(roles)), _digest(secret), last_day)


def parse(text: str) -> Tokens:
    """Read the file.

    Raises:
        ConfigError: a line is wrong. The words name its number and never what it says: it may be a token by mistake.
    """
    lines = ((number, line.split("#")[0].strip()) for number, line in enumerate(text.splitlines(), 1))
    return tuple(_token(number, line) for number, line in lines if line)


def _token(number: int, line: str) -> Token:
    form = LINE.fullmatch(line)
    if not form:
        raise ConfigError(
            f"line {number} is not NAME ROLE[,ROLE] SHA256 [expires=YYYY-MM-DD]: `camserve-server token new` makes one"
        )
    name, roles, digest, day = form.groups()
    try:
        return Token(name, _roles(roles), bytes.fromhex(digest), date.fromisoformat(day) if day else None)
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"line {number}: {error}") from error


def _roles(text: str) -> frozenset[str]:
    roles = frozenset(text.split(","))
    if unknown := sorted(roles.difference(ROLES)):
        raise ConfigError(f"no role {unknown[0]!r}: there are {', '.join(ROLES)}")
    return roles


def _digest(secret: str) -> bytes:
    # A fast hash is enough: nobody guesses 256 random bits, as they would a password.
    return hashlib.sha256(secret.encode()).digest()


def authenticate(tokens: Tokens, shown: list[object], today: date | None = None) -> Token:
    """Return whose token a call shows.

    Args:
        tokens: that are known.
        shown: every value of the call's metadata `authorization`.
        today: in UTC.

    Raises:
        Unauthenticated: there is none, or not one; or it is malformed, unknown or expired.
    """
    if not shown:
        raise Unauthenticated(f"this server wants a token: {HINT}")
    if len(shown) > 1:
        raise Unauthenticated(f"the call shows {len(shown)} authorizations: {HINT}")
    form = BEARER.fullmatch(shown[0]) if isinstance(shown[0], str) else None
    if form is None:
        raise Unauthenticated(f"the call's authorization is no bearer token: {HINT}")
    token = _known(tokens, _digest(form[1]))
    if token is None:
        raise Unauthenticated("the token is not known here, or was revoked: ask the server's operator for one")
    if token.last_day and (today or datetime.now(UTC).date()) > token.last_day:
        raise Unauthenticated(f"the token expired after {token.last_day}: ask the server's operator for a new one")
    return token


def _known(tokens: Tokens, digest: bytes) -> Token | None:
    known = None
    for token in tokens:  # all of them, so that the time taken does not say where in the file it stands
        if hmac.compare_digest(token.digest, digest):
            known = token
    return known
