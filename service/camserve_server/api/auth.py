"""Access control: TLS, and tokens with roles, which are checked before a request is read."""

import asyncio
import functools
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

RECHECK_INTERVAL = 1.0  # seconds between checks of the file of tokens for changes


def _rpcs(service: Any, role: str, *prefixes: str) -> dict[str, str]:
    """Return a role for the RPCs of a service whose names start with a prefix; without prefixes, for all of them."""
    name = oip.known_as(service.full_name)
    return {f"/{name}/{rpc.name}": role for rpc in service.methods if rpc.name.startswith(prefixes or ("",))}


REQUIRED_ROLES: Mapping[str, str] = (
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
"""The role that each RPC requires. Any other RPC, which is new or unknown, requires `admin`."""

PUBLIC_PREFIX = f"/{health.SERVICE_NAME}/"
"""Prefix of the RPCs that require no token. Orchestrators and load balancers check the health without one."""


def credentials(settings: Settings) -> grpc.ServerCredentials | None:
    """Return the credentials for TLS, or None without TLS. Each handshake uses the current contents of the files.

    gRPC requires TLS 1.2 or newer. With `tls_client_ca` callers need a certificate of that authority.

    Raises:
        ConfigError: a file is missing, or the files are not a certificate and its key.
    """
    if not settings.tls_cert and not settings.tls_key:
        if settings.tls_client_ca:
            raise ConfigError("tls_client_ca requires certificates of callers, which needs tls_cert and tls_key")
        return None
    if not (settings.tls_cert and settings.tls_key):
        raise ConfigError("TLS needs both tls_cert and tls_key")
    _warn_of_open_key(settings.tls_key)
    paths = [path for path in (settings.tls_cert, settings.tls_key, settings.tls_client_ca) if path]
    current = reloading_file.ReloadingFile("certificates", paths, functools.partial(_certificates, paths))
    latest = [current.current()]

    def reload() -> grpc.ServerCertificateConfiguration | None:
        previous, latest[0] = latest[0], current.current()
        return None if latest[0] is previous else latest[0]

    return grpc.dynamic_ssl_server_credentials(
        latest[0],
        reload,  # type: ignore[arg-type]  # gRPC documents that None keeps the configuration
        bool(settings.tls_client_ca),
    )


def _warn_of_open_key(path: str) -> None:
    try:
        if Path(path).stat().st_mode & 0o004:
            log.warning("every user of this machine can read the key of the certificate", extra=logs.fields(file=path))
    except OSError:
        pass  # the error is raised when the file is read


def https_context(settings: Settings) -> ssl.SSLContext:
    """Return the TLS context of an HTTP server. Each handshake uses the current contents of the files.

    Call it after `credentials`, which checks that the settings fit together.

    Raises:
        ConfigError: a file is missing, or the files are not a certificate and its key.
    """
    paths = [path for path in (settings.tls_cert, settings.tls_key, settings.tls_client_ca) if path]
    current = reloading_file.ReloadingFile("certificates of HTTP", paths, functools.partial(_context, paths))
    context = current.current()

    def use_current(handshake: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _context: ssl.SSLContext) -> None:
        handshake.context = current.current()

    context.sni_callback = use_current  # called for every handshake, also for one without a server name
    return context


def _certificates(paths: Sequence[str], contents: reloading_file.Contents) -> grpc.ServerCertificateConfiguration:
    """Check that the files fit together, for which gRPC has no clear errors, and return the configuration."""
    _context(paths, contents)
    cert, key, *authority = contents
    return grpc.ssl_server_certificate_configuration([(key, cert)], *authority)


def _context(paths: Sequence[str], contents: reloading_file.Contents) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # With no password given, OpenSSL would prompt for one on the terminal.
        context.load_cert_chain(paths[0], paths[1], password="")
    except (OSError, ValueError) as error:
        reason = str(getattr(error, "reason", error)).lower().replace("_", " ")
        message = f"{paths[0]} and {paths[1]} are not a certificate and its unencrypted key in PEM: {reason}"
        raise ConfigError(message) from error
    try:
        for certificate in contents[2:]:
            context.load_verify_locations(cadata=certificate.decode("ascii"))
            context.verify_mode = ssl.CERT_REQUIRED
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{paths[2]} contains no certificate in PEM") from error
    if reloading_file.read(paths) != contents:
        raise ConfigError("the files changed while they were read")
    return context


class Authorizer:
    """Check of the tokens of calls, on the event loops of gRPC and of HTTP.

    Args:
        path: path of the file of tokens; changes take effect within a second.

    Raises:
        ConfigError: the file cannot be read.
    """

    def __init__(self, path: str) -> None:
        self._file = tokens.file(path)
        self._tokens, self._checked_at = self._file.current(), -RECHECK_INTERVAL

    def authorize(self, method: str, authorizations: list[Any]) -> Token:
        """Return the token of a call.

        Args:
            method: full name of the RPC, such as "/camserve.v1.ExplainService/Explain".
            authorizations: all values of the call's `authorization`.

        Raises:
            Unauthenticated: the call does not have exactly one valid token.
            PermissionDenied: the token lacks the role for this RPC.
        """
        token = tokens.authenticate(self._current_tokens(), authorizations)
        role = REQUIRED_ROLES.get(method, "admin")
        if role not in token.roles:
            roles = ", ".join(sorted(token.roles))
            raise PermissionDenied(f"this RPC requires a token with the role {role}; your token has {roles}")
        return token

    def _current_tokens(self) -> Tokens:
        now = asyncio.get_running_loop().time()
        if now - self._checked_at >= RECHECK_INTERVAL:
            self._checked_at, self._tokens = now, self._file.current()
        return self._tokens


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Interceptor that refuses calls without a token that has the required role.

    Args:
        authorizer: authorizer of calls.
        state: state of the server, which counts refused calls too.
    """

    def __init__(self, authorizer: Authorizer, state: ServerState) -> None:
        self._authorizer, self._state = authorizer, state

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Return the RPC's handler, or one that refuses the call. A stream's token is checked with each message."""
        method, metadata = handler_call_details.method, handler_call_details.invocation_metadata
        if method.startswith(PUBLIC_PREFIX):
            return await continuation(handler_call_details)
        try:
            logs.CALLER.set(self._authorize(method, metadata).name)
        except ServiceError as error:
            return _refusal(self._state, method, error)
        handler: Any = await continuation(handler_call_details)
        if handler is None or not handler.stream_stream:
            return cast("Handler", handler)
        return self._checked_stream(handler, lambda: self._authorize(method, metadata))

    @staticmethod
    def _checked_stream(handler: Any, check: Callable[[], object]) -> Handler:
        async def answer(_requests: object, context: Context) -> None:
            await handler.stream_stream(Messages(context, check), context)

        serializers = handler.request_deserializer, handler.response_serializer
        return grpc.stream_stream_rpc_method_handler(answer, *serializers)

    def _authorize(self, method: str, metadata: Any) -> Token:
        return self._authorizer.authorize(method, [value for key, value in metadata or () if key == "authorization"])


def _refusal(state: ServerState, method: str, error: ServiceError) -> Handler:
    rpc = method.rpartition("/")[2] if method in REQUIRED_ROLES else "unknown RPC"

    # Registered as a stream whatever the RPC is, because gRPC receives messages of a stream only on demand.
    async def refuse(_requests: object, context: Context) -> None:
        async with rpc_scope(state, context, rpc):
            raise error

    return grpc.stream_stream_rpc_method_handler(refuse)
