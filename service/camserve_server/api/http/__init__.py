"""HTTP with JSON on the same services, and the web page. Imported only by a server with an `http_address`.

Every RPC is `POST /package.Service/Method`, in the form of the Connect protocol. The servicers, limits, tokens,
deadlines and telemetry are those of gRPC: a call's context has the methods of a gRPC context. The package may import
what `api` may, and Starlette and uvicorn, which nothing else imports.
"""
