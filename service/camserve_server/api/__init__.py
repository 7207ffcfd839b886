"""The API: gRPC servicers, authentication, connection limits, and errors as gRPC statuses.

`codec` converts between protobuf messages and plain values. `oip` implements the Open Inference Protocol. Only this
package and `cluster` import grpc, google.protobuf or camserve.v1.

It may import `serving` and the packages below.
"""
