"""The camserve server: explanations of vision models over gRPC.

    with camserve_server.running() as address:
        with camserve.Client(address) as client:
            client.explain("cat.jpg").explanations[0].save("why.jpg")
"""
