"""Who may call: TLS and tokens at the door, before anything of a request is read."""

import asyncio
import functools
import ipaddress
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection_pb2

from camserve.v1 import evaluate_pb2, explain_pb2, models_pb2
from camserve_server.api import oip, tokens
from camserve_server.api.connection_limits import Messages
from camserve_server.api.interceptor import Handler
from camserve_server.api.rpc import Context, ServerState, rpc_scope
from camserve_server.api.tokens import Token, Tokens
from camserve_server.core import logs, reloading_file
from camserve_server.core.config import Settings
from camserve_server.core.errors import ConfigError, PermissionDenied, ServiceError

log = logging.getLogger(__name__)

RECHECK = 1.0  # seconds for which the tokens of the file are taken to be as they were


def _rpcs(service: Any, role: str, *beginnings: str) -> dict[str, str]:
    name = oip.known_as(service.full_name)
    return {f"/{name}/{rpc.name}": role for rpc in service.methods if rpc.name.startswith(beginnings or ("",))}


NEEDED: Mapping[str, str] = (
    _rpcs(explain_pb2.DESCRIPTOR.services_by_name["ExplainService"], "explain")
    | _rpcs(evaluate_pb2.DESCRIPTOR.services_by_name["EvaluateService"], "explain")
    | _rpcs(models_pb2.DESCRIPTOR.services_by_name["ModelService"], "observe", "List", "Get")
    | _rpcs(models_pb2.DESCRIPTOR.services_by_name["ModelService"], "admin", "Load", "Unload")
    | _rpcs(oip.SERVICE, "explain", "ModelInfer", "ModelStreamInfer")
    | _rpcs(oip.SERVICE, "observe", "Server", "ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics")
    | _rpcs(oip.SERVICE, "observe", "RepositoryIndex")
    | _rpcs(oip.SERVICE, "admin", "RepositoryModel")
    | _rpcs(reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"], "observe")
)
"""The role that an RPC needs. One that is not here, as it is new or unknown, needs `admin`."""

OPEN = f"/{health.SERVICE_NAME}/"
"""Health wants no token: whoever asks for it, an orchestrator or a balancer, has none, and it says only yes or no."""


def check(settings: Settings) -> None:
    """Refuse settings by which anyone could call, where more than this machine can.

    Raises:
        ConfigError: the address is beyond loopback, and callers are not known or not encrypted.
    """
    guarded = settings.tls_cert and (settings.tokens_file or settings.tls_client_ca)
    for address in filter(None, (settings.address, settings.metrics_address)):
        if not (guarded or is_local(address)):
            _check_insecure(settings, address)


def _check_insecure(settings: Settings, address: str) -> None:
    if not settings.insecure:
        raise ConfigError(
            f"{address} can be reached from other machines: set tls_cert, tls_key and tokens_file (or "
            "tls_client_ca), or listen on 127.0.0.1; or, if whoever reaches it may call, as where a container's port "
            "is published on 127.0.0.1 alone, say --insecure (CAMSERVE_INSECURE=true)"
        )
    if address == settings.metrics_address:
        log.warning("insecure: whoever reaches the port may see the metrics", extra=logs.fields(address=address))
        return
    more = ", and load and unload models" if settings.admin else ""
    log.warning("insecure: whoever reaches the port may call%s", more, extra=logs.fields(address=address))


def is_local(address: str) -> bool:
    """Say whether only this machine can reach an address: a loopback one, or a socket in the file system.

    Example:
        >>> is_local("localhost:1"), is_local("[::1]:1"), is_local("unix:/run/camserve"), is_local("0.0.0.0:1")
        (True, True, True, False)
    """
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: only of this one is it known where it leads
        return host == "localhost"


def credentials(settings: Settings) -> grpc.ServerCredentials | None:
    """Return what TLS needs, or None without TLS. Renewed files are taken up by the next handshake.

    TLS is 1.2 or newer, as gRPC has it. With `tls_client_ca` a caller needs a certificate by that authority.

    Raises:
        ConfigError: a file is missing, or they are no certificate and its key.
    """
    if not settings.tls_cert and not settings.tls_key:
        if settings.tls_client_ca:
            raise ConfigError("tls_client_ca asks callers for certificates, which needs tls_cert and tls_key")
        return None
    if not (settings.tls_cert and settings.tls_key):
        raise ConfigError("TLS needs both tls_cert and tls_key")
    _warn_of_open_key(settings.tls_key)
    paths = [path for path in (settings.tls_cert, settings.tls_key, settings.tls_client_ca) if path]
    current = reloading_file.ReloadingFile("certificates", paths, functools.partial(_certificates, paths))
    handed = [current.current()]

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        before, handed[0] = handed[0], current.current()
        return None if handed[0] is before else handed[0]

    return grpc.dynamic_ssl_server_credentials(
        handed[0],
        renewed,  # type: ignore[arg-type]  # gRPC says itself that None leaves things as they are
        bool(settings.tls_client_ca),
    )


def _warn_of_open_key(path: str) -> None:
    try:
        if Path(path).stat().st_mode & 0o004:
            log.warning("every user of this machine can read the key of the certificate", extra=logs.fields(file=path))
    except OSError:
        pass  # whoever reads it next says so


def _certificates(paths: Sequence[str], contents: reloading_file.Contents) -> grpc.ServerCertificateConfiguration:
    """Make what gRPC takes, of files that fit together; gRPC itself would say too little of ones that do not."""
    cert, key, *authority = contents
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(paths[0], paths[1], password="")
    except (OSError, ValueError) as error:
        why = str(getattr(error, "reason", error)).lower().replace("_", " ")
        words = f"{paths[0]} and {paths[1]} are no certificate and its key in PEM, not encrypted: {why}"
        raise ConfigError(words) from error
    try:
        for each in authority:
            context.load_verify_locations(cadata=each.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{paths[2]} holds no certificate in PEM") from error
    if reloading_file.read(paths) != contents:
        raise ConfigError("the files changed while they were read")
    return grpc.ssl_server_certificate_configuration([(key, cert)], *authority)


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Lets those calls through whose token is for them.

    Args:
        path: of the file of tokens; what is changed in it counts within a second.
        house: counts the calls that are refused, too.

    Raises:
        ConfigError: the file cannot be read.
    """

    def __init__(self, path: str, house: ServerState) -> None:
        self._kept = known(path)
        self._house = house
        self._tokens, self._looked = self._kept.current(), -RECHECK

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Return a handler that refuses the call, or the RPC's own. For a stream, check the token with each request."""
        method, metadata = handler_call_details.method, handler_call_details.invocation_metadata
        if method.startswith(OPEN):
            return await continuation(handler_call_details)
        try:
            logs.CALLER.set(self._admitted(method, metadata).name)
        except ServiceError as error:
            return _refusal(self._house, method, error)
        handler: Any = await continuation(handler_call_details)
        if handler is None or not handler.stream_stream:
            return cast("Handler", handler)
        return self._of_stream(handler, lambda: self._admitted(method, metadata))

    @staticmethod
    def _of_stream(handler: Any, check: Callable[[], object]) -> Handler:
        async def answer(_requests: object, context: Context) -> None:
            await handler.stream_stream(Messages(context, check), context)

        ends = handler.request_deserializer, handler.response_serializer
        return grpc.stream_stream_rpc_method_handler(answer, *ends)

    def _admitted(self, method: str, metadata: Any) -> Token:
        token = tokens.authenticate(self._current(), [value for key, value in metadata or () if key == "authorization"])
        role = NEEDED.get(method, "admin")
        if role not in token.roles:
            raise PermissionDenied(
                f"this needs a token with the role {role}; yours has {', '.join(sorted(token.roles))}"
            )
        return token

    def _current(self) -> Tokens:
        now = asyncio.get_running_loop().time()
        if now - self._looked >= RECHECK:
            self._looked, self._tokens = now, self._kept.current()
        return self._tokens


def known(path: str) -> reloading_file.ReloadingFile[Tokens]:
    """Return the tokens of a file, which are read again when it changes.

    Raises:
        ConfigError: the file cannot be read.
    """
    return reloading_file.ReloadingFile("tokens", (path,), lambda contents: _tokens(path, contents))


def _tokens(path: str, contents: reloading_file.Contents) -> Tokens:
    try:
        found = tokens.parse(contents[0].decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not found:
        log.warning("there are no tokens, so nobody may call", extra=logs.fields(file=path))
    return found


def _refusal(house: ServerState, method: str, error: ServiceError) -> Handler:
    rpc = method.rpartition("/")[2] if method in NEEDED else "an RPC unknown here"

    # As a stream, whatever the RPC is: of a stream nothing is read that is not asked for.
    async def refuse(_requests: object, context: Context) -> None:
        async with rpc_scope(house, context, rpc):
            raise error

    return grpc.stream_stream_rpc_method_handler(refuse)
