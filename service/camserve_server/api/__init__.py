"""The border: gRPC servicers, authentication, connection limits, and errors as statuses.

`codec` converts between protobuf and plain values; `oip` speaks the Open Inference Protocol. Only this room and
`cluster` import grpc, google.protobuf or camserve.v1.

It may import `serving` and the rooms below.
"""
