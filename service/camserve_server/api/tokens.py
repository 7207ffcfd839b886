"""Access tokens, stored as hashes in a file with lines `NAME ROLE[,ROLE] SHA256 [expires=DATE]`."""

import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import TypeAlias

from camserve_server.core import logs, reloading_file
from camserve_server.core.errors import ConfigError, Unauthenticated

log = logging.getLogger(__name__)

ROLES = ("explain", "observe", "admin")
"""Roles of a token.

explain: explain images and evaluate explanations. observe: list models and methods, and use reflection. admin: load and
unload models.
"""

NAME = r"[\w.@-]{1,64}"
LINE = re.compile(rf"({NAME})\s+([a-z,]+)\s+([0-9a-f]{{64}})(?:\s+expires=(\d{{4}}-\d\d-\d\d))?", re.ASCII)
BEARER = re.compile(r"bearer +([!-~]{1,512})", re.ASCII | re.IGNORECASE)
HINT = "send one metadata entry `authorization: Bearer TOKEN` (Python: token=, command line: CAMSERVE_TOKEN)"


@dataclass(frozen=True, slots=True)
class Token:
    """Record of a token, without the token itself.

    Attributes:
        name: name of the holder, for the log.
        roles: roles of the token.
        digest: SHA-256 of the token, 32 bytes.
        last_day: the last day on which the token is valid, in UTC; None if it does not expire.
    """

    name: str
    roles: frozenset[str]
    digest: bytes
    last_day: date | None = None

    def line(self) -> str:
        """Return the token's line in the file."""
        expires = f" expires={self.last_day}" if self.last_day else ""
        return f"{self.name} {','.join(sorted(self.roles))} {self.digest.hex()}{expires}"


Tokens: TypeAlias = tuple[Token, ...]


def new(name: str, roles: Iterable[str], last_day: date | None = None) -> tuple[str, Token]:
    """Create a token of 256 random bits.

    Returns:
        The secret token for its holder, and the record to store.

    Raises:
        ConfigError: the name or a role is invalid.
    """
    if not re.fullmatch(NAME, name, re.ASCII):
        raise ConfigError(f"invalid name {name!r}: a name has 1 to 64 letters, digits and characters of . _ @ -")
    secret = f"camserve_{secrets.token_urlsafe(32)}"  # the prefix lets scanners recognise leaked secrets
    return secret, Token(name, _roles(",".join(roles)), _digest(secret), last_day)


def file(path: str) -> reloading_file.ReloadingFile[Tokens]:
    """Return a file of tokens that is read again when it changes.

    Raises:
        ConfigError: the file cannot be read.
    """
    return reloading_file.ReloadingFile("tokens", (path,), lambda contents: _parse_tokens(path, contents))


def _parse_tokens(path: str, contents: reloading_file.Contents) -> Tokens:
    try:
        result = parse(contents[0].decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file in UTF-8") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not result:
        log.warning("the file contains no tokens: every call is refused", extra=logs.fields(file=path))
    return result


def parse(text: str) -> Tokens:
    """Parse the contents of the file.

    Raises:
        ConfigError: a line is malformed. The message has its number and not its text, which may be a secret token.
    """
    lines = ((number, line.split("#")[0].strip()) for number, line in enumerate(text.splitlines(), 1))
    return tuple(_parse_line(number, line) for number, line in lines if line)


def _parse_line(number: int, line: str) -> Token:
    match = LINE.fullmatch(line)
    if not match:
        raise ConfigError(
            f"line {number} is not NAME ROLE[,ROLE] SHA256 [expires=YYYY-MM-DD]: `camserve-server token new` prints one"
        )
    name, roles, digest, day = match.groups()
    try:
        return Token(name, _roles(roles), bytes.fromhex(digest), date.fromisoformat(day) if day else None)
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"line {number}: {error}") from error


def _roles(text: str) -> frozenset[str]:
    roles = frozenset(text.split(","))
    if unknown := sorted(roles.difference(ROLES)):
        raise ConfigError(f"unknown role {unknown[0]!r}: the roles are {', '.join(ROLES)}")
    return roles


def _digest(secret: str) -> bytes:
    # A fast hash is enough: 256 random bits cannot be guessed, unlike a password.
    return hashlib.sha256(secret.encode()).digest()


def authenticate(tokens: Tokens, authorizations: list[object], today: date | None = None) -> Token:
    """Return the token of a call.

    Args:
        tokens: the valid tokens.
        authorizations: all values of the call's metadata `authorization`.
        today: the current date in UTC. Default: today.

    Raises:
        Unauthenticated: the call does not have exactly one token, or its token is malformed, unknown or expired.
    """
    if not authorizations:
        raise Unauthenticated(f"this server requires a token: {HINT}")
    if len(authorizations) > 1:
        raise Unauthenticated(f"the call has {len(authorizations)} authorizations: {HINT}")
    match = BEARER.fullmatch(authorizations[0]) if isinstance(authorizations[0], str) else None
    if match is None:
        raise Unauthenticated(f"the call's authorization is not a bearer token: {HINT}")
    token = _find(tokens, _digest(match[1]))
    if token is None:
        raise Unauthenticated("the token is unknown or was revoked: ask the server's operator for a new one")
    if token.last_day and (today or datetime.now(UTC).date()) > token.last_day:
        raise Unauthenticated(f"the token expired after {token.last_day}: ask the server's operator for a new one")
    return token


def _find(tokens: Tokens, digest: bytes) -> Token | None:
    result = None
    for token in tokens:  # all of them, so that the time taken does not depend on the token's place in the file
        if hmac.compare_digest(token.digest, digest):
            result = token
    return result
